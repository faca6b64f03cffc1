//! Samples of a server's memory, from `/metrics`, while it is measured.

use super::client::HttpTarget;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(250);

/// Shares are of the tier's blocks, 0 to 1; `None`: the server does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemorySample {
    /// Seconds since the benchmark's first request.
    pub t_s: f64,
    pub device_used: Option<f64>,
    pub device_cached: Option<f64>,
    pub swap_used: Option<f64>,
    pub running: Option<f64>,
    /// Swapped ones too.
    pub waiting: Option<f64>,
}

impl MemorySample {
    /// Reads metrics under Pagetide's or vLLM's names. `None` if there is nothing about memory.
    fn of_page(page: &str, t_s: f64) -> Option<Self> {
        let values = |series: &dyn Fn(&str) -> bool| {
            let lines = page.lines().filter(|line| series(line));
            let values: Vec<f64> = lines.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
            (!values.is_empty()).then_some(values)
        };
        let sum = |series: &dyn Fn(&str) -> bool| Some(values(series)?.iter().sum::<f64>());
        // A name with its brace, or with the space of a series without labels.
        let named = |line: &str, name: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
        let all = |name: &str| sum(&|line| named(line, name));
        let mean = |name: &str| {
            let values = values(&|line| named(line, name))?;
            Some(values.iter().sum::<f64>() / values.len() as f64)
        };
        let of = |name: &str, label: &str| sum(&|line| named(line, name) && line.contains(label));
        let share = |name: &str, state: &str| {
            let all = all(name).filter(|all| *all > 0.0)?;
            Some(of(name, &format!("state=\"{state}\""))? / all)
        };
        let add = |one: Option<f64>, other: Option<f64>| Some(one? + other.unwrap_or(0.0));
        let state = |state: &str| of("pagetide_requests", &format!("state=\"{state}\""));
        let sample = Self {
            t_s,
            // A share of each of its engines' blocks, which have as many.
            device_used: share("pagetide_device_blocks", "used").or_else(|| mean("vllm:kv_cache_usage_perc")),
            device_cached: share("pagetide_device_blocks", "cached"),
            swap_used: share("pagetide_swap_blocks", "used"),
            running: state("running").or_else(|| all("vllm:num_requests_running")),
            waiting: add(state("waiting"), state("swapped")).or_else(|| all("vllm:num_requests_waiting")),
        };
        sample.device_used.map(|_| sample)
    }
}

/// Looks at the page again and again until it is dropped or asked for what it has seen.
pub struct MemorySampler {
    seen: Rc<RefCell<Vec<MemorySample>>>,
    task: tokio::task::JoinHandle<()>,
}

impl MemorySampler {
    /// `began` is the start of the benchmark. A server without metrics, or with another key for them, gives no samples.
    /// If one request for metrics fails, the next one may still succeed.
    pub fn start(target: &HttpTarget, began: Instant) -> Self {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let (samples, client) = (seen.clone(), target.client.clone());
        let (url, key) = (format!("{}/metrics", target.url), target.metrics_key.clone().or(target.api_key.clone()));
        let task = actix_web::rt::spawn(async move {
            loop {
                let request = client.get(&url).timeout(Duration::from_secs(5));
                let request = if let Some(key) = &key { request.bearer_auth(key) } else { request };
                if let Ok(answer) = request.send().await {
                    if !answer.status().is_success() {
                        return;
                    }
                    let t_s = began.elapsed().as_secs_f64();
                    if let Ok(page) = answer.text().await {
                        let Some(sample) = MemorySample::of_page(&page, t_s) else { return };
                        samples.borrow_mut().push(sample);
                    }
                }
                actix_web::rt::time::sleep(INTERVAL).await;
            }
        });
        Self { seen, task }
    }

    /// What was seen: a run that was over before the first look had an answer waits for that one.
    pub async fn stop(self) -> Vec<MemorySample> {
        while self.seen.borrow().is_empty() && !self.task.is_finished() {
            actix_web::rt::time::sleep(Duration::from_millis(1)).await;
        }
        self.task.abort();
        self.seen.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn pages_of_both_kinds_are_read() {
        let ours = "# TYPE pagetide_device_blocks gauge\n\
                    pagetide_device_blocks{state=\"used\"} 6\npagetide_device_blocks{state=\"cached\"} 3\n\
                    pagetide_device_blocks{state=\"free\"} 3\npagetide_swap_blocks{state=\"used\"} 0\n\
                    pagetide_requests{state=\"running\"} 4\npagetide_requests{state=\"waiting\"} 2\n\
                    pagetide_requests{state=\"swapped\"} 1\npagetide_requests_total{outcome=\"stop\"} 9\n";
        let expected = MemorySample {
            t_s: 1.5,
            device_used: Some(0.5),
            device_cached: Some(0.25),
            swap_used: None,
            running: Some(4.0),
            waiting: Some(3.0),
        };
        assert_eq!(MemorySample::of_page(ours, 1.5), Some(expected), "no swap pool has no share");
        let theirs = "vllm:kv_cache_usage_perc{model_name=\"m\",engine=\"0\"} 0.25\n\
                      vllm:num_requests_running{model_name=\"m\"} 7.0\nvllm:num_requests_waiting{model_name=\"m\"} 1.0\n\
                      vllm:num_requests_waiting_by_reason{model_name=\"m\",reason=\"capacity\"} 1.0\n";
        let sample = MemorySample::of_page(theirs, 0.0).unwrap();
        assert_eq!((sample.device_used, sample.running, sample.waiting), (Some(0.25), Some(7.0), Some(1.0)));
        let two = "vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\nvllm:kv_cache_usage_perc{engine=\"1\"} 1.0\n\
                   vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_running{engine=\"1\"} 3\n";
        let sample = MemorySample::of_page(two, 0.0).unwrap();
        assert_eq!((sample.device_used, sample.running), (Some(0.75), Some(5.0)), "two engines");
        assert_eq!(MemorySample::of_page("up 1\n", 0.0), None);
    }

    #[test]
    fn a_look_that_fails_is_not_the_last() {
        actix_web::rt::System::new().block_on(async {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            let server = std::thread::spawn(move || {
                let page = "pagetide_device_blocks{state=\"used\"} 1\n";
                // Closed without an answer, cut off in the middle of one, and whole.
                for (page, len) in [("", 0), ("page", 99), (page, page.len())] {
                    let (mut connection, _) = listener.accept().unwrap();
                    let _ = connection.read(&mut [0; 4096]);
                    if len > 0 {
                        let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {len}\r\n\r\n");
                        let _ = connection.write_all((head + page).as_bytes());
                    }
                }
            });
            let target = HttpTarget::connect(&url, Some("m".into()), None, false).await.unwrap();
            let sampler = MemorySampler::start(&target, Instant::now());
            let begin = Instant::now();
            while sampler.seen.borrow().is_empty() {
                assert!(begin.elapsed() < Duration::from_secs(60), "it has given up");
                actix_web::rt::time::sleep(Duration::from_millis(5)).await;
            }
            server.join().unwrap();
            assert_eq!(sampler.stop().await[0].device_used, Some(1.0));
        });
    }
}
