//! What a chapter consists of.

use crate::chart::Chart;
use crate::chart::xy::XyChart;
use crate::memory::output::Table;

/// A chapter of the report.
pub struct ReportSection {
    pub title: &'static str,
    /// Whether its figures come from the simulation alone.
    pub is_simulated: bool,
    pub parts: Vec<ReportPart>,
}

pub enum ReportPart {
    Text(String),
    Table {
        caption: String,
        table: Table,
    },
    /// With the name of its file.
    Plot(String, ReportPlot),
}

pub enum ReportPlot {
    Categories(Chart),
    Xy(XyChart),
}

impl ReportPlot {
    /// A whole document.
    pub fn svg(&self) -> String {
        match self {
            ReportPlot::Categories(chart) => chart.svg(),
            ReportPlot::Xy(chart) => chart.svg(),
        }
    }

    pub fn element(&self) -> String {
        match self {
            ReportPlot::Categories(chart) => chart.element(),
            ReportPlot::Xy(chart) => chart.element(),
        }
    }
}
