//! What an experiment has to say, and the folder that it goes into.

use crate::chart::Chart;
use pagetide_base::error::StartError;
use serde_json::{Map, Value, json};
use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

/// The result of one experiment.
#[derive(Clone, Debug)]
pub struct Section {
    /// As in `--only`.
    pub name: &'static str,
    pub title: &'static str,
    /// Paragraphs and tables, in their order.
    pub parts: Vec<SectionPart>,
    /// Each with its file's name, without an extension.
    pub charts: Vec<(String, Chart)>,
    pub figures: Value,
}

#[derive(Clone, Debug)]
pub enum SectionPart {
    Text(String),
    Table(Table),
}

/// A Markdown table.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub header: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<'a>(header: impl IntoIterator<Item = &'a str>) -> Self {
        Self { header: header.into_iter().map(str::to_owned).collect(), rows: Vec::new() }
    }

    /// As many cells as the header has.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.header.len(), "a row has a cell for each column");
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| {} |", self.header.join(" | "))?;
        writeln!(f, "|{}", "---|".repeat(self.header.len()))?;
        self.rows.iter().try_for_each(|row| writeln!(f, "| {} |", row.join(" | ")))
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "## {}", self.title)?;
        for part in &self.parts {
            match part {
                SectionPart::Text(text) => writeln!(f, "\n{text}")?,
                SectionPart::Table(table) => write!(f, "\n{table}")?,
            }
        }
        Ok(())
    }
}

/// `--out`: `memory.md`, `memory.json` and a file for each chart. Files of these names are replaced.
pub struct ResultFolder {
    path: PathBuf,
    /// The command, for both files.
    command: String,
    markdown: String,
    figures: Map<String, Value>,
}

impl ResultFolder {
    pub fn create(path: &Path, command: String) -> Result<Self, StartError> {
        std::fs::create_dir_all(path).map_err(|error| wrong(path, &error))?;
        let markdown = format!("# Memory\n\n```console\n$ {command}\n```\n");
        Ok(Self { path: path.to_owned(), command, markdown, figures: Map::new() })
    }

    /// Adds an experiment; what was added before is there even if the next one fails.
    pub fn add(&mut self, section: &Section) -> Result<(), StartError> {
        write!(self.markdown, "\n{section}").expect("writing to a String");
        for (name, chart) in &section.charts {
            let file = format!("{name}.svg");
            self.write(&file, &chart.svg())?;
            write!(self.markdown, "\n![{}]({file})\n", chart.title).expect("writing to a String");
        }
        self.figures.insert(section.name.into(), section.figures.clone());
        let now = time::OffsetDateTime::now_utc();
        let all = json!({
            "command": self.command,
            "version": env!("CARGO_PKG_VERSION"),
            "date": now.format(&time::format_description::well_known::Rfc3339).expect("the year has four digits"),
            "experiments": self.figures,
        });
        self.write("memory.md", &self.markdown)?;
        self.write("memory.json", &(serde_json::to_string_pretty(&all).expect("a Value can be written") + "\n"))
    }

    fn write(&self, name: &str, content: &str) -> Result<(), StartError> {
        let path = self.path.join(name);
        std::fs::write(&path, content).map_err(|error| wrong(&path, &error))
    }
}

fn wrong(path: &Path, error: &std::io::Error) -> StartError {
    StartError::new(format!("--out {}: {error}", path.display()))
}

pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// For shares of a few hundredths.
pub fn fine_percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}

/// Of some values, the middle one; of an even number, the lower of the two. 0 of none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}
