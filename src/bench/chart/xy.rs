//! Lines over numbers: a distribution, something over time, one measure against another.

use super::{BOTTOM, HEIGHT, LEFT, LEGEND_Y, RIGHT, STYLE, WIDTH};
use super::{beginning, colour, escape, legend, number, push, scale, text, y_label};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// From 0 on.
    Linear,
    /// Of numbers above 0; others are left out.
    Log,
}

#[derive(Clone, Debug)]
pub struct XyChart {
    pub title: String,
    pub x_label: String,
    pub y_label: String,
    pub x_scale: Scale,
    pub y_scale: Scale,
    pub lines: Vec<ChartLine>,
    /// Marked positions on the horizontal axis, with their labels.
    pub marks: Vec<(f64, String)>,
}

#[derive(Clone, Debug)]
pub struct ChartLine {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// Labels of the points; there may be fewer than points, or none.
    pub labels: Vec<String>,
}

impl ChartLine {
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), points, labels: Vec::new() }
    }
}

/// With more points than these a line stands without a dot at each.
const MOST_DOTS: usize = 24;
/// Room above the plot for the words of marks.
const MARKS_ROOM: f64 = 16.0;

impl XyChart {
    /// A whole SVG document.
    pub fn svg(&self) -> String {
        self.drawn(STYLE)
    }

    /// An element for a page that has [`STYLE`].
    pub fn element(&self) -> String {
        self.drawn("")
    }

    fn drawn(&self, style: &str) -> String {
        let legend = legend(self.lines.iter().map(|line| line.name.as_str()));
        let top = LEGEND_Y + legend.1 + 6.0 + if self.marks.is_empty() { 0.0 } else { MARKS_ROOM };
        let mut svg = beginning(&self.title, style);
        svg += &legend.0;
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let x = Axis::new(self.x_scale, points().map(|(x, _)| *x), (LEFT, right));
        let y = Axis::new(self.y_scale, points().map(|(_, y)| *y), (bottom, top));
        for (value, at) in y.ticks() {
            grid(&mut svg, (LEFT, at), (right, at), at >= bottom - 0.5);
            text(&mut svg, (LEFT - 8.0, at + 4.0), "end", "", &number(value));
        }
        for (value, at) in x.ticks() {
            grid(&mut svg, (at, bottom), (at, top), at <= LEFT + 0.5);
            text(&mut svg, (at, bottom + 18.0), "middle", "", &number(value));
        }
        for (value, words) in &self.marks {
            if let Some(at) = x.place(*value) {
                push(
                    &mut svg,
                    format_args!(
                        "<line class=\"axis\" stroke-dasharray=\"3 4\" x1=\"{at:.1}\" y1=\"{bottom}\" x2=\"{at:.1}\" y2=\"{top:.1}\"/>"
                    ),
                );
                text(&mut svg, (at + 2.0, top - 5.0), "start", "value", words);
            }
        }
        text(&mut svg, ((LEFT + right) / 2.0, HEIGHT - 14.0), "middle", "", &self.x_label);
        y_label(&mut svg, top, &self.y_label);
        for (index, line) in self.lines.iter().enumerate() {
            line.draw(&mut svg, &colour(index), &x, &y);
        }
        svg + "</svg>\n"
    }
}

fn grid(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), is_axis: bool) {
    let class = if is_axis { "axis" } else { "grid" };
    push(svg, format_args!("<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"));
}

impl ChartLine {
    fn draw(&self, svg: &mut String, colour: &str, x: &Axis, y: &Axis) {
        let placed = self.points.iter().enumerate();
        let placed: Vec<(usize, f64, f64)> =
            placed.filter_map(|(index, (px, py))| Some((index, x.place(*px)?, y.place(*py)?))).collect();
        let path: Vec<String> = placed.iter().map(|(_, x, y)| format!("{x:.1},{y:.1}")).collect();
        push(svg, format_args!("<polyline class=\"line {colour}\" points=\"{}\"/>", path.join(" ")));
        if self.points.len() > MOST_DOTS {
            return;
        }
        for (index, px, py) in placed {
            let (name, (vx, vy)) = (escape(&self.name), self.points[index]);
            push(
                svg,
                format_args!(
                    "<circle class=\"fill {colour}\" cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"4\"><title>{name}: {}, {}</title></circle>",
                    number(vx),
                    number(vy)
                ),
            );
            if let Some(label) = self.labels.get(index) {
                text(svg, (px + 7.0, py - 6.0), "start", "value", label);
            }
        }
    }
}

/// Values on pixels.
struct Axis {
    scale: Scale,
    from: f64,
    to: f64,
    /// Between ticks; of a linear one.
    step: f64,
    pixels: (f64, f64),
}

impl Axis {
    fn new(kind: Scale, values: impl Iterator<Item = f64>, pixels: (f64, f64)) -> Self {
        let usable = |value: &f64| value.is_finite() && (kind == Scale::Linear || *value > 0.0);
        let (least, most) =
            values.filter(usable).fold((f64::INFINITY, 0.0f64), |(least, most), v| (least.min(v), most.max(v)));
        match kind {
            Scale::Linear => {
                let (to, step) = scale(most);
                Self { scale: kind, from: 0.0, to, step, pixels }
            }
            Scale::Log if most <= 0.0 => Self { scale: kind, from: 1.0, to: 10.0, step: 0.0, pixels },
            Scale::Log => {
                let from = round_125(least, false);
                // Some width if all values are equal.
                Self { scale: kind, from, to: round_125(most, true).max(2.0 * from), step: 0.0, pixels }
            }
        }
    }

    /// `None` of what has no place on it.
    fn place(&self, value: f64) -> Option<f64> {
        let share = match self.scale {
            Scale::Linear => value / self.to,
            Scale::Log if value > 0.0 => (value / self.from).ln() / (self.to / self.from).ln(),
            Scale::Log => return None,
        };
        share.is_finite().then_some(self.pixels.0 + (self.pixels.1 - self.pixels.0) * share)
    }

    /// Round values, and their pixels.
    fn ticks(&self) -> Vec<(f64, f64)> {
        let values: Vec<f64> = match self.scale {
            Scale::Linear => (0..=(self.to / self.step).round() as usize).map(|tick| tick as f64 * self.step).collect(),
            Scale::Log => {
                let powers = self.from.log10().floor() as i32..=self.to.log10().ceil() as i32;
                let decades = (self.to / self.from).log10();
                // Over many decades the powers of ten are enough.
                let digits: &[f64] = if decades > 4.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
                let all = powers.flat_map(|power| digits.iter().map(move |digit| digit * 10f64.powi(power)));
                all.filter(|value| (self.from * 0.999..=self.to * 1.001).contains(value)).collect()
            }
        };
        values.into_iter().filter_map(|value| Some((value, self.place(value)?))).collect()
    }
}

/// The next of 1, 2, 5, 10, ... that is not below `value`, or not above it.
fn round_125(value: f64, up: bool) -> f64 {
    let ten = 10f64.powf(value.log10().floor());
    let candidates = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * ten);
    let found = if up {
        candidates.into_iter().find(|candidate| *candidate >= value * 0.9999)
    } else {
        candidates.into_iter().rev().find(|candidate| *candidate <= value * 1.0001)
    };
    found.unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::tests::assert_well_formed;

    fn chart(x_scale: Scale, lines: Vec<ChartLine>) -> XyChart {
        XyChart {
            title: "a < b".into(),
            x_label: "ms".into(),
            y_label: "share".into(),
            x_scale,
            y_scale: Scale::Linear,
            lines,
            marks: vec![(3.0, "here & now".into())],
        }
    }

    #[test]
    fn elements_are_well_formed_and_stay_inside() {
        let few = ChartLine { labels: vec!["C = 1".into()], ..ChartLine::new("few", vec![(1.0, 0.0), (30.0, 1.0)]) };
        let many = ChartLine::new("many", (1..200).map(|i| (f64::from(i), f64::from(i) / 200.0)).collect());
        for scale in [Scale::Linear, Scale::Log] {
            let svg = chart(scale, vec![few.clone(), many.clone()]).element();
            assert_well_formed(&svg);
            assert_eq!((svg.matches("<circle").count(), svg.matches("C = 1").count()), (2, 1), "{svg}");
            let points = svg.split("points=\"").skip(1).flat_map(|rest| rest.split('"').next().unwrap().split(' '));
            for point in points {
                let (x, y) = point.split_once(',').unwrap();
                let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                assert!(
                    (LEFT..=WIDTH - RIGHT + 0.1).contains(&x) && (0.0..=HEIGHT - BOTTOM + 0.1).contains(&y),
                    "{point}"
                );
            }
        }
        assert_well_formed(&chart(Scale::Log, vec![ChartLine::new("none", vec![(0.0, 1.0)])]).element());
    }

    #[test]
    fn log_axes_begin_and_end_round_and_keep_ratios() {
        let axis = Axis::new(Scale::Log, [3.0, 450.0].into_iter(), (0.0, 100.0));
        assert_eq!((axis.from, axis.to), (2.0, 500.0));
        let place = |value| axis.place(value).unwrap();
        assert!((place(20.0) - place(2.0) - (place(50.0) - place(5.0))).abs() < 1e-9);
        let ticks: Vec<f64> = axis.ticks().into_iter().map(|(value, _)| value.round()).collect();
        assert_eq!(ticks, [2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0]);
        assert_eq!(axis.place(0.0), None);
        assert_eq!(round_125(10.0, true), 10.0);
        assert_eq!(round_125(10.0, false), 10.0);
    }
}
