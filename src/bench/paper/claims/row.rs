//! A claim beside what was found.

use crate::chart::number;
use serde::Serialize;

/// A row of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClaimRow {
    pub topic: &'static str,
    pub claim: String,
    /// Section or figure of the paper, or who else says so.
    pub source: &'static str,
    pub claimed: String,
    pub ours: String,
    pub verdict: ClaimVerdict,
    /// How ours was found.
    pub how: &'static str,
    /// Why ours differs; empty if it does not.
    pub why: String,
    /// Whether ours depends on the speed of this machine.
    pub depends_on_speed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum ClaimVerdict {
    Agrees,
    Differs,
    /// The part that finds it was not run.
    NotRun,
}

/// A claim that a number lies between two others.
pub struct NumberClaim {
    pub topic: &'static str,
    pub claim: String,
    pub source: &'static str,
    /// As it is told.
    pub claimed: &'static str,
    /// Where ours has to be to agree.
    pub within: (f64, f64),
    pub ours: Option<f64>,
    pub unit: &'static str,
    pub how: &'static str,
    /// For the case that it differs.
    pub why: &'static str,
    pub depends_on_speed: bool,
}

impl NumberClaim {
    pub fn row(self) -> ClaimRow {
        let (low, high) = self.within;
        let verdict = match self.ours {
            None => ClaimVerdict::NotRun,
            Some(ours) if (low..=high).contains(&ours) => ClaimVerdict::Agrees,
            Some(_) => ClaimVerdict::Differs,
        };
        ClaimRow {
            topic: self.topic,
            claim: self.claim,
            source: self.source,
            claimed: self.claimed.into(),
            ours: self.ours.map_or("not run".into(), |ours| format!("{}{}", number(ours), self.unit)),
            verdict,
            how: self.how,
            why: if verdict == ClaimVerdict::Differs { self.why.into() } else { String::new() },
            depends_on_speed: self.depends_on_speed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_comes_with_its_reason() {
        let claim = |ours| NumberClaim {
            topic: "t",
            claim: "c".into(),
            source: "1",
            claimed: "2 to 3",
            within: (2.0, 3.0),
            ours,
            unit: " x",
            how: "h",
            why: "because",
            depends_on_speed: false,
        };
        let row = claim(Some(2.5)).row();
        assert_eq!((row.verdict, row.ours.as_str(), row.why.as_str()), (ClaimVerdict::Agrees, "2.5 x", ""));
        let row = claim(Some(4.0)).row();
        assert_eq!((row.verdict, row.why.as_str()), (ClaimVerdict::Differs, "because"));
        assert_eq!(claim(None).row().verdict, ClaimVerdict::NotRun);
    }
}
