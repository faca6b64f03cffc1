//! What the peers' kernels compute, in float64.

use std::collections::HashMap;

/// Arrays by name, with their shapes.
#[derive(Default)]
pub struct Tensors(HashMap<String, (Vec<usize>, Vec<f64>)>);

impl Tensors {
    pub fn insert(&mut self, name: &str, shape: &[usize], values: Vec<f64>) {
        self.0.insert(name.into(), (shape.into(), values));
    }

    pub fn get(&self, name: &str) -> &(Vec<usize>, Vec<f64>) {
        self.0.get(name).unwrap_or_else(|| panic!("there is no {name}"))
    }

    fn values(&self, name: &str) -> &[f64] {
        &self.get(name).1
    }

    fn indices(&self, name: &str) -> Vec<usize> {
        self.values(name).iter().map(|value| *value as usize).collect()
    }
}

type Numbers = HashMap<String, f64>;

/// The contents of the result buffers.
pub fn results(kind: &str, numbers: &Numbers, tensors: &Tensors) -> Vec<(String, Vec<f64>)> {
    match kind {
        "matmul" => vec![("out".into(), matmul(numbers, tensors))],
        "product" => vec![("out".into(), product(numbers, tensors))],
        "softmax" => vec![("out".into(), softmax(numbers, tensors))],
        "layer_norm" => layer_norm(numbers, tensors),
        "attention" => {
            let (q, kv) = (tensors.get("q").0[0], tensors.get("k").0[0]);
            vec![("o".into(), Attention::new(numbers, tensors).over(&[(0..q).collect()], &[(0..kv).collect()]))]
        }
        "packed_attention" => {
            let rows: Vec<Vec<usize>> = tensors
                .indices("starts")
                .into_iter()
                .zip(tensors.indices("lengths"))
                .map(|(start, length)| (start..start + length).collect())
                .collect();
            vec![("o".into(), Attention::new(numbers, tensors).over(&rows, &rows))]
        }
        "paged_attention" => {
            let q_starts = tensors.indices("q_indptr");
            let rows: Vec<Vec<usize>> = q_starts.windows(2).map(|pair| (pair[0]..pair[1]).collect()).collect();
            vec![("o".into(), Attention::new(numbers, tensors).over(&rows, &token_slots(tensors)))]
        }
        "append_pages" => append_pages(tensors),
        other => panic!("no reference for {other}"),
    }
}

/// Of each sequence, the slots of its tokens: page · page size + place.
fn token_slots(tensors: &Tensors) -> Vec<Vec<usize>> {
    let page_size = tensors.get("k").0[1];
    let (pages, starts) = (tensors.indices("page_indices"), tensors.indices("page_indptr"));
    let last = tensors.indices("last_page_len");
    let sequence = |i: usize| {
        let own = &pages[starts[i]..starts[i + 1]];
        let num_tokens = (own.len() - 1) * page_size + last[i];
        (0..num_tokens).map(|token| own[token / page_size] * page_size + token % page_size).collect()
    };
    (0..last.len()).map(sequence).collect()
}

fn matmul(numbers: &Numbers, tensors: &Tensors) -> Vec<f64> {
    let [m, n, k] = ["m", "n", "k"].map(|name| numbers[name] as usize);
    let (a, b) = (tensors.values("a"), tensors.values("b"));
    let product = |i: usize| {
        let (row, column) = (i / n, i % n);
        (0..k).map(|j| a[row * k + j] * b[column * k + j]).sum()
    };
    (0..m * n).map(product).collect()
}

/// `a · b` of m x k and k x n matrices, which are stored by rows or by columns.
fn product(numbers: &Numbers, tensors: &Tensors) -> Vec<f64> {
    let [m, n, k] = ["m", "n", "k"].map(|name| numbers[name] as usize);
    let element = |name: &str, (rows, columns): (usize, usize), row: usize, column: usize| {
        let by_rows = numbers[&format!("{name}_by_rows")] != 0.0;
        tensors.values(name)[if by_rows { row * columns + column } else { column * rows + row }]
    };
    let sum = |i: usize| (0..k).map(|j| element("a", (m, k), i / n, j) * element("b", (k, n), j, i % n)).sum();
    (0..m * n).map(sum).collect()
}

fn softmax(numbers: &Numbers, tensors: &Tensors) -> Vec<f64> {
    let rows = tensors.values("x").chunks_exact(numbers["cols"] as usize);
    rows.flat_map(|row| {
        let max = row.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = row.iter().map(|x| (x - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(move |weight| weight / sum)
    })
    .collect()
}

fn layer_norm(numbers: &Numbers, tensors: &Tensors) -> Vec<(String, Vec<f64>)> {
    let (cols, eps) = (numbers["cols"] as usize, numbers["eps"]);
    let (weight, bias) = (tensors.values("weight"), tensors.values("bias"));
    let (mut out, mut means, mut factors) = (Vec::new(), Vec::new(), Vec::new());
    for row in tensors.values("x").chunks_exact(cols) {
        let mean = row.iter().sum::<f64>() / cols as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64;
        let factor = 1.0 / (variance + eps).sqrt();
        out.extend(row.iter().zip(weight).zip(bias).map(|((x, weight), bias)| (x - mean) * factor * weight + bias));
        means.push(mean);
        factors.push(factor);
    }
    vec![("out".into(), out), ("mean".into(), means), ("rstd".into(), factors)]
}

/// `q: [rows, num_qo_heads, head_dim]`, `k, v: [slots, num_kv_heads, head_dim]`, slots of pages too.
struct Attention<'a> {
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    num_qo_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    scale: f64,
    softcap: f64,
    /// A token sees so many before it; `None`: all.
    window_left: Option<usize>,
    causal: bool,
}

impl<'a> Attention<'a> {
    fn new(numbers: &Numbers, tensors: &'a Tensors) -> Self {
        let or = |name: &str, default: f64| numbers.get(name).copied().unwrap_or(default);
        Self {
            q: tensors.values("q"),
            k: tensors.values("k"),
            v: tensors.values("v"),
            num_qo_heads: numbers["num_qo_heads"] as usize,
            num_kv_heads: numbers["num_kv_heads"] as usize,
            head_dim: numbers["head_dim"] as usize,
            scale: numbers["scale"],
            softcap: or("softcap", 0.0),
            window_left: Some(or("window_left", -1.0)).filter(|window| *window >= 0.0).map(|window| window as usize),
            causal: or("causal", 1.0) != 0.0,
        }
    }

    /// Sequences of rows of `q`, the last tokens of sequences of slots.
    fn over(&self, rows: &[Vec<usize>], slots: &[Vec<usize>]) -> Vec<f64> {
        let mut out = vec![0.0; self.q.len()];
        for (rows, slots) in rows.iter().zip(slots) {
            for (i, row) in rows.iter().enumerate() {
                let position = slots.len() - rows.len() + i;
                let end = if self.causal { position + 1 } else { slots.len() };
                let first = self.window_left.map_or(0, |window| position.saturating_sub(window));
                for head in 0..self.num_qo_heads {
                    let start = (row * self.num_qo_heads + head) * self.head_dim;
                    self.one(&mut out[start..start + self.head_dim], start, head, &slots[first..end]);
                }
            }
        }
        out
    }

    fn one(&self, out: &mut [f64], q_start: usize, head: usize, slots: &[usize]) {
        let kv_head = head / (self.num_qo_heads / self.num_kv_heads);
        let start = |slot: usize| (slot * self.num_kv_heads + kv_head) * self.head_dim;
        let scores: Vec<f64> = slots
            .iter()
            .map(|slot| {
                let q = &self.q[q_start..q_start + self.head_dim];
                let k = &self.k[start(*slot)..start(*slot) + self.head_dim];
                let score = self.scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                if self.softcap > 0.0 { self.softcap * (score / self.softcap).tanh() } else { score }
            })
            .collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        for (slot, score) in slots.iter().zip(scores) {
            let weight = (score - max).exp() / sum;
            for (d, out) in out.iter_mut().enumerate() {
                *out += weight * self.v[start(*slot) + d];
            }
        }
    }
}

fn append_pages(tensors: &Tensors) -> Vec<(String, Vec<f64>)> {
    let slots = token_slots(tensors);
    let row = tensors.get("key").0[1..].iter().product::<usize>();
    let (batch, positions) = (tensors.indices("batch_indices"), tensors.indices("positions"));
    [("k", "key"), ("v", "value")]
        .map(|(cache, new)| {
            let mut expected = tensors.values(cache).to_vec();
            for (i, (sequence, position)) in batch.iter().zip(&positions).enumerate() {
                let slot = slots[*sequence][*position];
                expected[slot * row..(slot + 1) * row].copy_from_slice(&tensors.values(new)[i * row..(i + 1) * row]);
            }
            (cache.into(), expected)
        })
        .into()
}
