//! `pagetide generate`: a file of requests in, a file of results out, in the format of OpenAI's batch API.

use clap::Args;
use futures_util::stream::{self, StreamExt};
use pagetide_actors::answers::answer_body;
use pagetide_actors::runtime::Runtime;
use pagetide_api::batches::line::{BadLine, BatchEndpoint, RequestLine, ResultLine};
use pagetide_api::body::Bounds;
use pagetide_base::error::{ApiError, StartError};
use pagetide_terminal::options::ConfigOptions;
use pagetide_terminal::progress::{self, RequestProgress};
use pagetide_terminal::{log, open_files, output};
use serde_json::Value;
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;
use std::time::Duration;

#[derive(Args)]
pub struct GenerateArgs {
    /// Requests, one JSON object a line; '-' is standard input
    #[arg(long, value_name = "FILE")]
    input: String,
    /// Results, one JSON object a line, in the order of the input; '-' is standard output
    #[arg(long, value_name = "FILE")]
    output: String,
    /// Requests in work at once [default: twice scheduler.max_num_seqs, at most server.max_requests]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Option<u32>,
    #[command(flatten)]
    options: ConfigOptions,
}

/// Exits with 1 if a line failed; the results of the others are there all the same.
pub fn run(args: &GenerateArgs) -> Result<ExitCode, StartError> {
    let config = args.options.resolve()?.config;
    log::init(&config.log)?;
    open_files::ensure(0)?;
    let lines = read_lines(&args.input)?;
    let mut output = open_output(&args.input, &args.output)?;
    let limit = config.server.max_requests;
    let wanted = args.concurrency.unwrap_or(config.scheduler.max_num_seqs * 2) as usize;

    let runtime = Runtime::start(&config, progress::loading())?;
    let handle = runtime.handle();
    let answer = async |endpoint, body: &Value| answer_body(&handle, endpoint, body, |_| {}).await;
    let work = answer_all(&lines, wanted.min(limit), answer, &mut output);
    let failed = actix_rt::System::new().block_on(work)?;
    drop(runtime);
    if failed > 0 {
        let all = lines.len();
        output::complain(&format!("pagetide: {failed} of {all} requests failed; see their lines in {}", args.output));
    }
    Ok(if failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The lines that are not blank, each with its number.
fn read_lines(input: &str) -> Result<Vec<(usize, String)>, StartError> {
    let text = if input == "-" { io::read_to_string(io::stdin()) } else { std::fs::read_to_string(input) };
    let text = text.map_err(|error| StartError::new(format!("--input {input}: {error}")))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    Ok(lines.map(|(index, line)| (index + 1, line.to_owned())).collect())
}

/// Opened before the model is loaded, so that a wrong path is known at once.
fn open_output(input: &str, output: &str) -> Result<Box<dyn Write>, StartError> {
    if output == "-" {
        return Ok(Box::new(io::stdout()));
    }
    let same =
        |a: &str, b: &str| matches!((std::fs::canonicalize(a), std::fs::canonicalize(b)), (Ok(a), Ok(b)) if a == b);
    if same(input, output) {
        return Err(StartError::new(format!("--output {output} is the input: it would be overwritten")));
    }
    let file = File::create(output).map_err(|error| StartError::new(format!("--output {output}: {error}")))?;
    Ok(Box::new(BufWriter::new(file)))
}

/// Answers the lines, `concurrency` at a time, and writes the results in the order of the lines. Returns how many
/// failed.
async fn answer_all(
    lines: &[(usize, String)],
    concurrency: usize,
    answer: impl AsyncFn(BatchEndpoint, &Value) -> Result<Value, ApiError>,
    output: &mut dyn Write,
) -> Result<usize, StartError> {
    let mut progress = RequestProgress::new(lines.len() as u64);
    let requests = parse_all(lines);
    // Not `buffered`: a long answer at the front would keep its followers' places occupied.
    let mut results = stream::iter(requests.into_iter().enumerate())
        .map(|(index, request)| {
            let answer = &answer;
            async move { (index, answer_one(index, request, answer).await) }
        })
        .buffer_unordered(concurrency);
    let mut early: BTreeMap<usize, ResultLine> = BTreeMap::new();
    let (mut next, mut failed) = (0, 0);
    while let Some((index, result)) = results.next().await {
        progress.request_done(result.completion_tokens());
        failed += usize::from(!result.has_succeeded());
        early.insert(index, result);
        while let Some(result) = early.remove(&next) {
            write_line(output, &result)
                .map_err(|error| StartError::new(format!("cannot write the results: {error}")))?;
            next += 1;
        }
    }
    Ok(failed)
}

/// A result that is written is there, whatever happens later.
fn write_line(output: &mut dyn Write, result: &ResultLine) -> io::Result<()> {
    let mut line = serde_json::to_vec(result)?;
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

fn parse_all(lines: &[(usize, String)]) -> Vec<Result<RequestLine, BadLine>> {
    // The file is the user's own.
    let bounds = Bounds { max_values: 0, max_prompts: usize::MAX };
    let mut seen = HashSet::new();
    let parse = |(number, line): &(usize, String)| {
        let request = RequestLine::parse(line.as_bytes(), bounds, &BatchEndpoint::OPENAI);
        let request = request.and_then(|request| match seen.insert(request.custom_id.clone()) {
            true => Ok(request),
            false => Err(BadLine::repeated(request.custom_id)),
        });
        request.map_err(|bad| bad.at(*number as u64))
    };
    lines.iter().map(parse).collect()
}

async fn answer_one(
    index: usize,
    request: Result<RequestLine, BadLine>,
    answer: &impl AsyncFn(BatchEndpoint, &Value) -> Result<Value, ApiError>,
) -> ResultLine {
    let id = format!("batch_req_{index}");
    let RequestLine { custom_id, endpoint, body } = match request {
        Ok(request) => request,
        Err(bad) => return ResultLine::bad(id, bad),
    };
    let answer = loop {
        match answer(endpoint, &body).await {
            // A body may hold many prompts, so the engine can be full although `concurrency` is not reached. Here no
            // request is turned away: it waits and tries again.
            Err(error) if error.status == 429 => tokio::time::sleep(Duration::from_millis(100)).await,
            answer => break answer,
        }
    };
    ResultLine::answered(id, (custom_id, endpoint), answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_api::openai::Endpoint;
    use serde_json::json;
    use std::cell::Cell;

    fn numbered(lines: &[&str]) -> Vec<(usize, String)> {
        lines.iter().enumerate().map(|(index, line)| (index + 1, line.to_string())).collect()
    }

    fn request(id: usize, body: Value) -> String {
        json!({"custom_id": format!("c{id}"), "method": "POST", "url": "/v1/completions", "body": body}).to_string()
    }

    /// Runs the lines against a fake API; the results and how many failed.
    fn answers(
        lines: &[(usize, String)],
        concurrency: usize,
        answer: impl AsyncFn(BatchEndpoint, &Value) -> Result<Value, ApiError>,
    ) -> (Vec<Value>, usize) {
        let mut output = Vec::new();
        let work = answer_all(lines, concurrency, answer, &mut output);
        let failed = actix_rt::System::new().block_on(work).unwrap();
        let results = String::from_utf8(output).unwrap();
        (results.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), failed)
    }

    #[test]
    fn results_come_in_the_order_of_the_input_and_concurrency_is_bounded() {
        let lines: Vec<(usize, String)> =
            (0..40).map(|id| (id + 1, request(id, json!({"delay_ms": (40 - id) % 7})))).collect();
        let (running, most) = (Cell::new(0), Cell::new(0));
        let (results, failed) = answers(&lines, 8, async |endpoint, body: &Value| {
            assert_eq!(endpoint, BatchEndpoint::Generation(Endpoint::Completion));
            running.set(running.get() + 1);
            most.set(most.get().max(running.get()));
            tokio::time::sleep(Duration::from_millis(body["delay_ms"].as_u64().unwrap())).await;
            running.set(running.get() - 1);
            Ok(json!({"id": "cmpl-1", "usage": {"completion_tokens": 3}}))
        });
        assert_eq!((failed, most.get()), (0, 8));
        for (index, result) in results.iter().enumerate() {
            assert_eq!(result["custom_id"], format!("c{index}"));
            assert_eq!(result["response"]["status_code"], 200);
            assert_eq!(result["response"]["request_id"], "cmpl-1");
            assert_eq!(result["error"], Value::Null);
        }
        assert_eq!(results.len(), 40);
    }

    #[test]
    fn a_wrong_line_says_why_and_stops_nothing() {
        let good = request(0, json!({}));
        let lines = numbered(&[
            "{not json",
            "{}",
            r#"{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}"#,
            r#"{"custom_id": "b", "method": "POST", "url": "/v1/messages", "body": {}}"#,
            r#"{"custom_id": "c", "method": "POST", "url": "/v1/completions"}"#,
            r#"{"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {"stream": true}}"#,
            &good,
            &good,
        ]);
        let (results, failed) = answers(&lines, 2, async |_, _: &Value| Ok(json!({})));
        assert_eq!(failed, 7);
        let message = |index: usize| results[index]["error"]["message"].as_str().unwrap();
        assert!(message(0).starts_with("line 1: the line is not JSON"));
        assert_eq!(message(1), "line 2: custom_id: must be given, a text");
        assert_eq!(message(2), "line 3: method: must be \"POST\", not \"GET\"");
        assert!(message(3).starts_with("line 4: url: must be"));
        assert!(message(4).starts_with("line 5: body"));
        assert!(message(5).starts_with("line 6: body.stream"));
        assert_eq!(results[6]["response"]["status_code"], 200);
        assert_eq!(message(7), "line 8: custom_id: an earlier line has the same");
        assert_eq!((&results[2]["custom_id"], &results[2]["response"]), (&json!("a"), &Value::Null));
    }

    #[test]
    fn an_error_of_the_api_is_the_response_and_a_full_queue_is_waited_for() {
        let lines = numbered(&[&request(0, json!({})), &request(1, json!({"bad": true}))]);
        let tries = Cell::new(0);
        let (results, failed) = answers(&lines, 1, async |_, body: &Value| {
            if body["bad"] == true {
                return Err(ApiError::invalid("bad", "must not be"));
            }
            tries.set(tries.get() + 1);
            if tries.get() < 3 { Err(ApiError::overloaded(1, 1)) } else { Ok(json!({})) }
        });
        assert_eq!((failed, tries.get()), (1, 3));
        assert_eq!(results[0]["response"]["status_code"], 200);
        assert_eq!(results[1]["response"]["status_code"], 400);
        assert_eq!(results[1]["response"]["body"]["error"]["param"], "bad");
    }

    #[test]
    fn the_input_is_not_overwritten() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        assert!(open_output(path, path).is_err());
    }
}
