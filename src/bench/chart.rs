//! Charts as SVG with axes and a legend: bars or lines over a few categories here, lines over numbers in [`xy`].
//!
//! Colours follow the reader's light or dark theme, the background is that of the page, and fonts are those of the
//! system, so that a file needs nothing else.

pub mod xy;

use std::fmt::Write;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChartKind {
    /// Side by side.
    Bars,
    /// One on the other.
    Stacked,
    Lines,
}

/// A value of each series at each place.
#[derive(Clone, Debug)]
pub struct Chart {
    pub kind: ChartKind,
    pub title: String,
    pub x_label: String,
    pub y_label: String,
    /// Along the horizontal axis.
    pub places: Vec<String>,
    pub series: Vec<Series>,
}

#[derive(Clone, Debug)]
pub struct Series {
    pub name: String,
    /// The value of each category, 0 or more; `None` if it has none.
    pub values: Vec<Option<f64>>,
}

impl Series {
    pub fn new(name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Self {
        Self { name: name.into(), values: values.into_iter().map(Some).collect() }
    }
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const BOTTOM: f64 = 60.0;
const TITLE_Y: f64 = 26.0;
/// Of the first row of the legend.
const LEGEND_Y: f64 = 50.0;
const LEGEND_ROW: f64 = 20.0;
/// About the width of a letter of the legend.
const LETTER: f64 = 6.8;
/// Part of a place's width that its bars take.
const BARS_SHARE: f64 = 0.72;
/// Of a bar, to have its value above it.
const WIDE_ENOUGH: f64 = 22.0;

/// Colours that people with colour blindness can tell apart: hues and lightness differ (after Okabe and Ito).
pub const STYLE: &str = "\
<style>
svg text { font: 13px system-ui, sans-serif; fill: #1f2328; }
svg .title { font-size: 15px; font-weight: 600; }
svg .value { font-size: 11px; }
.grid { stroke: #d1d9e0; stroke-width: 1; }
.axis { stroke: #59636e; stroke-width: 1; }
.line { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
.c0 { --c: #0072b2; } .c1 { --c: #d55e00; } .c2 { --c: #009e73; } .c3 { --c: #aa4488; } .c4 { --c: #b58900; } .c5 { --c: #6e7781; }
.fill { fill: var(--c); }
.line { stroke: var(--c); }
@media (prefers-color-scheme: dark) {
svg text { fill: #e6edf3; }
.grid { stroke: #3d444d; }
.axis { stroke: #9198a1; }
.c0 { --c: #56b4e9; } .c1 { --c: #ff8c42; } .c2 { --c: #2ec799; } .c3 { --c: #d98cc0; } .c4 { --c: #e3c84b; } .c5 { --c: #a0a8b1; }
}
</style>
";
const NUM_COLOURS: usize = 6;

impl Chart {
    /// A whole SVG document.
    pub fn svg(&self) -> String {
        self.drawn(STYLE)
    }

    /// An element for a page that has [`STYLE`].
    pub fn element(&self) -> String {
        self.drawn("")
    }

    fn drawn(&self, style: &str) -> String {
        let legend = legend(self.series.iter().map(|series| series.name.as_str()));
        let plot = Plot::new(self, LEGEND_Y + legend.1 + 6.0);
        let mut svg = beginning(&self.title, style);
        svg += &legend.0;
        plot.axes(&mut svg, self);
        match self.kind {
            ChartKind::Bars | ChartKind::Stacked => plot.bars(&mut svg, self),
            ChartKind::Lines => plot.lines(&mut svg, self),
        }
        svg + "</svg>\n"
    }

    /// The largest value that is drawn.
    fn most(&self) -> f64 {
        let at = |place: usize| self.series.iter().filter_map(move |series| *series.values.get(place)?);
        let of_place = |place| match self.kind {
            ChartKind::Stacked => at(place).sum(),
            ChartKind::Bars | ChartKind::Lines => at(place).fold(0.0, f64::max),
        };
        (0..self.places.len()).map(of_place).fold(0.0, f64::max)
    }
}

/// The element, with its title.
fn beginning(title: &str, style: &str) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" role=\"img\">\n<title>{}</title>\n{style}",
        escape(title)
    );
    text(&mut svg, (LEFT, TITLE_Y), "start", "title", title);
    svg
}

/// A square and a name for each series, in as many rows as it takes; and their height.
fn legend<'a>(names: impl Iterator<Item = &'a str>) -> (String, f64) {
    let (mut svg, mut x, mut row) = (String::new(), LEFT, 0.0);
    for (index, name) in names.enumerate() {
        let width = 16.0 + LETTER * name.chars().count() as f64 + 18.0;
        if x + width > WIDTH - RIGHT && x > LEFT {
            (x, row) = (LEFT, row + 1.0);
        }
        let y = LEGEND_Y + row * LEGEND_ROW;
        let colour = colour(index);
        push(
            &mut svg,
            format_args!(
                "<rect class=\"fill {colour}\" x=\"{x:.1}\" y=\"{:.1}\" width=\"11\" height=\"11\" rx=\"2\"/>",
                y - 10.0
            ),
        );
        text(&mut svg, (x + 16.0, y), "start", "", name);
        x += width;
    }
    (svg, (row + 1.0) * LEGEND_ROW)
}

/// What the vertical axis says.
fn y_label(svg: &mut String, top: f64, label: &str) {
    let (x, y) = (18.0, (top + HEIGHT - BOTTOM) / 2.0);
    let label = escape(label);
    push(
        svg,
        format_args!(
            "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 {x} {y:.1})\">{label}</text>"
        ),
    );
}

/// The area in which values are drawn.
struct Plot {
    top: f64,
    /// Pixels of a place.
    place_width: f64,
    /// Value at the top.
    most: f64,
    step: f64,
}

impl Plot {
    fn new(chart: &Chart, top: f64) -> Self {
        let (most, step) = scale(chart.most());
        let place_width = (WIDTH - LEFT - RIGHT) / chart.places.len().max(1) as f64;
        Self { top, place_width, most, step }
    }

    fn y(&self, value: f64) -> f64 {
        let bottom = HEIGHT - BOTTOM;
        bottom - (bottom - self.top) * value / self.most
    }

    fn middle(&self, place: usize) -> f64 {
        LEFT + self.place_width * (place as f64 + 0.5)
    }

    fn axes(&self, svg: &mut String, chart: &Chart) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in 0..=(self.most / self.step).round() as usize {
            let value = tick as f64 * self.step;
            let y = self.y(value);
            let class = if tick == 0 { "axis" } else { "grid" };
            push(
                svg,
                format_args!("<line class=\"{class}\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>"),
            );
            text(svg, (LEFT - 8.0, y + 4.0), "end", "", &number(value));
        }
        for (place, name) in chart.places.iter().enumerate() {
            text(svg, (self.middle(place), bottom + 18.0), "middle", "", name);
        }
        text(svg, ((LEFT + right) / 2.0, HEIGHT - 14.0), "middle", "", &chart.x_label);
        y_label(svg, self.top, &chart.y_label);
    }

    fn bars(&self, svg: &mut String, chart: &Chart) {
        let stacked = chart.kind == ChartKind::Stacked;
        let side_by_side = if stacked { 1 } else { chart.series.len().max(1) };
        let width = self.place_width * BARS_SHARE / side_by_side as f64;
        for place in 0..chart.places.len() {
            let left = self.middle(place) - self.place_width * BARS_SHARE / 2.0;
            let mut below = 0.0;
            for (index, series) in chart.series.iter().enumerate() {
                let Some(value) = series.values.get(place).copied().flatten() else { continue };
                let x = if stacked { left } else { left + width * index as f64 };
                let (top, bottom) = (self.y(below + value), self.y(below));
                let (name, colour) = (escape(&series.name), colour(index));
                push(
                    svg,
                    format_args!(
                        "<rect class=\"fill {colour}\" x=\"{x:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\">\
                         <title>{name}: {}</title></rect>",
                        width - 1.0,
                        bottom - top,
                        number(value)
                    ),
                );
                if !stacked && width > WIDE_ENOUGH {
                    text(svg, (x + width / 2.0, top - 4.0), "middle", "value", &number(value));
                }
                below += if stacked { value } else { 0.0 };
            }
        }
    }

    fn lines(&self, svg: &mut String, chart: &Chart) {
        for (index, series) in chart.series.iter().enumerate() {
            let colour = colour(index);
            let values = series.values.iter().enumerate();
            let points: Vec<(f64, f64, f64)> =
                values.filter_map(|(place, value)| Some((self.middle(place), self.y((*value)?), (*value)?))).collect();
            let path: Vec<String> = points.iter().map(|(x, y, _)| format!("{x:.1},{y:.1}")).collect();
            push(svg, format_args!("<polyline class=\"line {colour}\" points=\"{}\"/>", path.join(" ")));
            for (x, y, value) in points {
                let name = escape(&series.name);
                push(
                    svg,
                    format_args!(
                        "<circle class=\"fill {colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"><title>{name}: {}</title></circle>",
                        number(value)
                    ),
                );
            }
        }
    }
}

/// A round number that is at least `most`, and the distance between ticks: 4 to 8 of them.
fn scale(most: f64) -> (f64, f64) {
    if most <= 0.0 || !most.is_finite() {
        return (1.0, 0.25);
    }
    let unit = 10f64.powf((most / 4.0).log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|factor| factor * unit).into_iter().find(|step| most / step <= 7.0);
    let step = step.unwrap_or(10.0 * unit);
    ((most / step).ceil() * step, step)
}

/// With three digits that count.
pub fn number(value: f64) -> String {
    let decimals = match value.abs() {
        value if value == 0.0 || value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        value if value >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

fn colour(index: usize) -> String {
    format!("c{}", index % NUM_COLOURS)
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, class: &str, content: &str) {
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    push(
        svg,
        format_args!("<text{class} x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escape(content)),
    );
}

fn push(svg: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(svg, "{line}").expect("writing to a String");
}

/// For XML and HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(kind: ChartKind) -> Chart {
        let series = vec![
            Series::new("a < b & \"c\"", [1.0, 2.0, 30.0]),
            Series { name: "gaps".into(), values: vec![Some(4.0), None, Some(0.0)] },
        ];
        let places = vec!["one".into(), "two".into(), "<3>".into()];
        Chart { kind, title: "A & B".into(), x_label: "x".into(), y_label: "share, %".into(), places, series }
    }

    /// Every element is closed by itself or in order, attributes are quoted, and text has no bare `<` or `&`.
    pub(super) fn assert_well_formed(svg: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = svg;
        while let Some(start) = rest.find('<') {
            let end = start + rest[start..].find('>').expect("a tag ends");
            let (text, tag) = (&rest[..start], &rest[start + 1..end]);
            assert!(!text.contains('>') || open.last() == Some(&"style"), "{text}");
            let entities = text.matches('&').count();
            let known = ["&amp;", "&lt;", "&gt;", "&quot;"].map(|entity| text.matches(entity).count());
            assert_eq!(entities, known.iter().sum::<usize>(), "{text}");
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name), "{tag}");
            } else if !tag.ends_with('/') {
                open.push(name);
            }
            rest = &rest[end + 1..];
        }
        assert!(open.is_empty() && rest.trim().is_empty(), "{open:?}");
    }

    #[test]
    fn documents_are_well_formed_and_hold_every_value() {
        for kind in [ChartKind::Bars, ChartKind::Stacked, ChartKind::Lines] {
            let svg = chart(kind).svg();
            assert_well_formed(&svg);
            assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\"") && svg.ends_with("</svg>\n"));
            let marks = svg.matches("<title>a &lt; b &amp; &quot;c&quot;: ").count();
            assert_eq!((marks, svg.matches("<title>gaps: ").count()), (3, 2), "{kind:?}: {svg}");
        }
        assert_well_formed(&Chart { places: Vec::new(), series: Vec::new(), ..chart(ChartKind::Lines) }.svg());
    }

    #[test]
    fn bars_stand_on_the_axis_and_stay_inside() {
        let attribute = |rect: &str, name: &str| -> f64 {
            let start = rect.find(&format!(" {name}=\"")).unwrap() + name.len() + 3;
            rect[start..].split('"').next().unwrap().parse().unwrap()
        };
        let svg = chart(ChartKind::Stacked).svg();
        let bars: Vec<&str> =
            svg.lines().filter(|line| line.starts_with("<rect") && line.contains("<title>")).collect();
        for bar in &bars {
            let (y, height) = (attribute(bar, "y"), attribute(bar, "height"));
            assert!(y >= LEGEND_Y && height >= 0.0 && y + height <= HEIGHT - BOTTOM + 0.1, "{bar}");
        }
        let bottom = |bar: &str| attribute(bar, "y") + attribute(bar, "height");
        assert!((bottom(bars[0]) - (HEIGHT - BOTTOM)).abs() < 0.11);
        assert!((bottom(bars[1]) - attribute(bars[0], "y")).abs() < 0.11, "the second is on the first");
    }

    #[test]
    fn scales_are_round_and_large_enough() {
        for most in [0.003, 0.9, 1.0, 7.3, 42.0, 99.9, 100.0, 12_345.0] {
            let (top, step) = scale(most);
            let ticks = top / step;
            assert!(top >= most && top < 1.6 * most, "{most}: {top}");
            assert!((3.0..=8.0).contains(&ticks) && (ticks - ticks.round()).abs() < 1e-9, "{most}: {ticks}");
        }
        assert_eq!(scale(0.0).0, 1.0);
        assert_eq!([0.0, 0.25, 2.5, 42.0, 12_345.6].map(number), ["0", "0.25", "2.5", "42", "12346"]);
    }
}
