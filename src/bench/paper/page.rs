//! The report: one HTML file with tables and charts, that loads nothing and can be printed.

use super::claims::{ClaimRow, ClaimVerdict};
use super::sections::{ReportPart, ReportSection};
use crate::chart::escape;
use crate::html::beginning;
use crate::memory::output::Table;

/// What a report is about.
pub struct ReportHead {
    pub command: String,
    /// Version and time.
    pub made: String,
    /// For people: processor, cores, memory, operating system.
    pub machine: String,
    /// Whether it is a short run.
    pub quick: bool,
}

const REPORT_STYLE: &str = "\
<style>
main { display: block; }
.claims td, .claims th { white-space: normal; text-align: left; vertical-align: top; max-width: 34ch; }
.claims td.fact { white-space: nowrap; }
caption { text-align: left; font-weight: 600; padding: 12px 0 4px; }
figure { margin: 0; break-inside: avoid; }
.agrees { color: var(--good); } .differs { color: var(--bad); } .open { color: var(--dim); }
.kind { font-size: 13px; font-weight: 500; color: var(--dim); }
@media print {
:root { color-scheme: light; --fg: #000000; --dim: #444444; --bg: #ffffff; --box: #f6f8fa; --line: #999999; --good: #116329; --bad: #a40e26; }
body { max-width: none; padding: 0; font-size: 10px; }
.wide { overflow: visible; }
.charts { grid-template-columns: 1fr 1fr; }
tr { break-inside: avoid; }
th, td { padding: 2px 6px 2px 0; white-space: normal; }
h2 { break-after: avoid; }
thead { display: table-header-group; }
}
</style>
";

pub fn page(head: &ReportHead, claims: &[ClaimRow], sections: &[ReportSection]) -> String {
    let mut page = beginning("The claims of PagedAttention").replace("</head>", &format!("{REPORT_STYLE}</head>"));
    page = page.replace("<h1>", "<main>\n<h1>");
    about(&mut page, head, claims);
    claims_table(&mut page, claims);
    for section in sections {
        let kind = if section.is_simulated { " <span class=\"kind\">simulated</span>" } else { "" };
        page += &format!("<h2>{}{kind}</h2>\n", escape(section.title));
        parts(&mut page, &section.parts);
    }
    page + "</main>\n</body>\n</html>\n"
}

fn about(page: &mut String, head: &ReportHead, claims: &[ClaimRow]) {
    let num = |verdict| claims.iter().filter(|row| row.verdict == verdict).count();
    let (agree, differ, open) = (num(ClaimVerdict::Agrees), num(ClaimVerdict::Differs), num(ClaimVerdict::NotRun));
    *page += &format!(
        "<p>Kwon et al., “Efficient Memory Management for Large Language Model Serving with PagedAttention”, SOSP 2023, \
         repeated with Pagetide. Every system is a policy for memory and batches in front of the same engine. So only memory \
         management and batching differ.</p>\n<p class=\"dim\">{}<br>{}</p>\n<pre tabindex=\"0\">{}</pre>\n",
        escape(&head.made),
        escape(&head.machine),
        escape(&head.command)
    );
    if head.quick {
        *page += "<p class=\"note\">A short run (--quick): fewer loads, and fewer requests of each.</p>\n";
    }
    *page += &format!(
        "<div class=\"tiles\">\n<div class=\"tile\"><b>{}</b><span>claims</span></div>\n<div class=\"tile\"><b>{agree}</b>\
         <span>agree</span></div>\n<div class=\"tile\"><b>{differ}</b><span>differ</span></div>\n<div class=\"tile\">\
         <b>{open}</b><span>not run</span></div>\n</div>\n",
        claims.len()
    );
}

fn claims_table(page: &mut String, claims: &[ClaimRow]) {
    *page += "<h2>Claims</h2>\n<p>A claim agrees if ours lies within the claimed range, or near the claimed number. \
              “Simulated” is the real scheduler and block pool with the timing model below; nothing of it was run on \
              that GPU.</p>\n<div class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"Claims\">\
              <table class=\"claims\">\n<thead><tr>";
    for name in ["topic", "claim", "section, figure", "claimed", "ours", "verdict", "how", "where they differ"] {
        *page += &format!("<th scope=\"col\">{name}</th>");
    }
    *page += "</tr></thead>\n<tbody>\n";
    for row in claims {
        let (class, verdict) = match row.verdict {
            ClaimVerdict::Agrees => ("agrees", "agrees"),
            ClaimVerdict::Differs => ("differs", "differs"),
            ClaimVerdict::NotRun => ("open", "not run"),
        };
        *page += &format!(
            "<tr><td>{}</td><td>{}</td><td>{}</td><td class=\"fact\">{}</td><td class=\"fact\">{}</td>\
             <td class=\"{class}\">{verdict}</td><td>{}</td><td>{}</td></tr>\n",
            escape(row.topic),
            escape(&row.claim),
            escape(row.source),
            escape(&row.claimed),
            escape(&row.ours),
            escape(row.how),
            escape(&row.why)
        );
    }
    *page += "</tbody>\n</table></div>\n";
}

fn parts(page: &mut String, parts: &[ReportPart]) {
    let mut in_charts = false;
    for part in parts {
        let is_chart = matches!(part, ReportPart::Plot(..));
        if is_chart != in_charts {
            *page += if is_chart { "<div class=\"charts\">\n" } else { "</div>\n" };
            in_charts = is_chart;
        }
        match part {
            ReportPart::Text(text) => *page += &format!("<p>{}</p>\n", escape(&text.replace('*', ""))),
            ReportPart::Table { caption, table } => table_element(page, caption, table),
            ReportPart::Plot(_, plot) => *page += &format!("<figure>\n{}</figure>\n", plot.element()),
        }
    }
    if in_charts {
        *page += "</div>\n";
    }
}

fn table_element(page: &mut String, caption: &str, table: &Table) {
    let caption = escape(caption);
    *page += &format!(
        "<div class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table>\n<caption>{caption}</caption>\n\
         <thead><tr>"
    );
    for name in &table.header {
        *page += &format!("<th scope=\"col\">{}</th>", escape(name));
    }
    *page += "</tr></thead>\n<tbody>\n";
    for row in &table.rows {
        *page += "<tr>";
        for cell in row {
            *page += &format!("<td>{}</td>", escape(cell));
        }
        *page += "</tr>\n";
    }
    *page += "</tbody>\n</table></div>\n";
}

#[cfg(test)]
mod tests {
    use super::super::claims;
    use super::super::results::PaperResults;
    use super::super::sections::sections;
    use super::*;
    use crate::memory::layout;

    #[test]
    fn a_report_stands_alone_and_escapes_what_it_shows() {
        let results = PaperResults { layouts: layout::layouts(&[], 40.0).unwrap(), ..PaperResults::default() };
        let head = ReportHead {
            command: "pagetide bench paper --out <x>".into(),
            made: "today".into(),
            machine: "a & b".into(),
            quick: true,
        };
        let page = page(&head, &claims::rows(&results), &sections(&results));
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</main>\n</body>\n</html>\n"));
        let without_namespaces = page.replace("http://www.w3.org/2000/svg", "");
        for fetched in ["src=", "href=", "url(", "@import", "<script"] {
            assert!(!without_namespaces.contains(fetched), "{fetched}");
        }
        assert!(page.contains("--out &lt;x&gt;") && page.contains("a &amp; b") && page.contains("A short run"));
        for element in ["div", "table", "thead", "tbody", "figure", "svg", "main", "tr"] {
            let opened = page.matches(&format!("<{element}>")).count() + page.matches(&format!("<{element} ")).count();
            assert_eq!(opened, page.matches(&format!("</{element}>")).count(), "{element}");
        }
    }
}
