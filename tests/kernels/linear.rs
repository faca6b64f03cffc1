//! Matrix products, the vocabulary product and the embedding, which all use packed matrices.

use crate::support::*;
use pagetide_backend::cpu::{CpuBackend, Isa};
use pagetide_backend::{Backend, DType, TensorRole};
use proptest::prelude::*;

struct Case {
    n: usize,
    k: usize,
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Case {
    fn new(n: usize, k: usize, with_bias: bool, seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let weights = numbers.vec(n * k);
        Self { n, k, weights, bias: with_bias.then(|| numbers.vec(n)) }
    }

    /// `x: [rows, k]`
    fn run(&self, backend: &mut CpuBackend, x: &[f32], stored: DType, dtype: DType) -> Vec<f32> {
        let rows = x.len() / self.k;
        // As two parts, to cover fused projections.
        let cut = self.n / 3;
        let parts = [
            Stored::new(&self.weights[..cut * self.k], cut, stored),
            Stored::new(&self.weights[cut * self.k..], self.n - cut, stored),
        ];
        let parts: Vec<_> = parts.iter().map(Stored::tensor).filter(|part| part.rows > 0).collect();
        let w = backend.matrix(&parts, dtype).unwrap();
        let bias = self.bias.as_ref().map(|bias| {
            let stored = Stored::new(bias, 1, DType::F32);
            backend.vector(&[stored.tensor()]).unwrap()
        });
        let x = tensor(backend, x, self.k);
        let mut out = tensor(backend, &vec![f32::NAN; rows * self.n], self.n);
        backend.begin(&plain_batch(rows));
        backend.linear(&x, &w, bias.as_ref(), &mut out);
        assert!(out.as_slice()[rows * self.n..].iter().all(|x| x.is_nan()), "rows past the batch are left alone");
        backend.logits(&x, rows, &w, bias.as_ref());
        let logits = backend.read_logits();
        assert_eq!(bits(&logits), bits(&out.as_slice()[..rows * self.n]));
        logits
    }

    fn reference(&self, x: &[f32], stored: DType, dtype: DType) -> Vec<f64> {
        let weight = |i: usize| f64::from(round(round(self.weights[i], stored), dtype));
        let mut out = Vec::new();
        for x in x.chunks_exact(self.k) {
            for row in 0..self.n {
                let products = (0..self.k).map(|i| f64::from(round(x[i], dtype)) * weight(row * self.k + i));
                out.push(products.sum::<f64>() + self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[row])));
            }
        }
        out
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn products_are_right(
        n in 1usize..150, k in 1usize..200, rows in 1usize..90, with_bias: bool, seed: u64,
        stored in 0usize..3, dtype in 0usize..3, threads in 1usize..4,
    ) {
        let (stored, dtype) = (DTYPES[stored], DTYPES[dtype]);
        let case = Case::new(n, k, with_bias, seed);
        let x = Numbers::new(!seed).vec(rows * k);
        let expected = case.reference(&x, stored, dtype);
        for isa in isas() {
            let got = case.run(&mut backend(isa, threads), &x, stored, dtype);
            assert_close(&got, &expected, 1e-4, &format!("{isa} {} x {k} -> {n}", dtype.name()));
        }
    }
}

/// A row's result has the same bytes alone and in a batch, with any number of threads.
#[test]
fn a_row_does_not_see_its_company() {
    const ROWS: usize = 170;
    for isa in isas() {
        for dtype in DTYPES {
            // The second shape is large enough to be shared by the team.
            for (n, k) in [(40, 72), (300, 1100)] {
                let case = Case::new(n, k, true, 3);
                let x = Numbers::new(4).vec(ROWS * k);
                let all = case.run(&mut backend(isa, 4), &x, dtype, dtype);
                for threads in 1..=4 {
                    let mut backend = backend(isa, threads);
                    for rows in [1, 2, 3, 5, 8, 11, 13, 16, 17, 31, 33, 48, 69, 133] {
                        let first = (rows * 7) % (ROWS - rows + 1);
                        let got = case.run(&mut backend, &x[first * k..][..rows * k], dtype, dtype);
                        let expected = &all[first * n..][..rows * n];
                        assert!(bits(&got) == bits(expected), "{isa} {} {rows} rows, {threads} threads", dtype.name());
                    }
                }
            }
        }
    }
}

/// Infinities and NaN of one row do not affect other rows.
#[test]
fn a_bad_row_spoils_no_other() {
    let case = Case::new(33, 64, false, 5);
    let good = Numbers::new(6).vec(64);
    for isa in isas() {
        for dtype in DTYPES {
            let mut backend = backend(isa, 2);
            let alone = case.run(&mut backend, &good, dtype, dtype);
            for rows in [3, 40] {
                let mut x = vec![f32::NAN; rows * 64];
                x[64..128].copy_from_slice(&good);
                x[128..].fill(f32::INFINITY);
                let got = case.run(&mut backend, &x, dtype, dtype);
                assert_eq!(bits(&got[33..66]), bits(&alone), "{isa} {} {rows} rows", dtype.name());
                assert!(got[..33].iter().all(|x| x.is_nan()) && got[66..].iter().all(|x| !x.is_finite()));
            }
        }
    }
}

#[test]
fn embeddings_come_out_of_the_packed_matrix() {
    let (vocab, cols) = (37, 21);
    let table = Numbers::new(7).vec(vocab * cols);
    for stored in DTYPES {
        for dtype in DTYPES {
            let mut backend = backend(Isa::detect(), 2);
            let bytes = Stored::new(&table, vocab, stored);
            let matrix = backend.matrix(&[bytes.tensor()], dtype).unwrap();
            let mut batch = plain_batch(4);
            batch.tokens = vec![36, 0, 17, 36];
            batch.positions = vec![3, 0, 34, 1];
            let mut out = backend.tensor(4, cols, TensorRole::Activation).unwrap();
            backend.begin(&batch);
            backend.embed(&matrix, 1.0, &mut out);
            let value = |row: u32, i: usize| round(round(table[row as usize * cols + i], stored), dtype);
            for (row, token) in batch.tokens.iter().enumerate() {
                for i in 0..cols {
                    assert_eq!(out.as_slice()[row * cols + i], value(*token, i));
                }
            }
            backend.add_position_embedding(&matrix, 2, &mut out);
            for (row, (token, position)) in batch.tokens.iter().zip(&batch.positions).enumerate() {
                for i in 0..cols {
                    assert_eq!(out.as_slice()[row * cols + i], value(*token, i) + value(position + 2, i));
                }
            }
        }
    }
}

#[test]
fn wrong_checkpoints_are_refused() {
    let backend = backend(Isa::Portable, 1);
    let stored = Stored::new(&[1.0; 12], 3, DType::F32);
    let mut cut = stored.tensor();
    cut.bytes = &cut.bytes[..40];
    let error = backend.matrix(&[cut], DType::F32).err().unwrap().to_string();
    assert_eq!(error, "a tensor [3, 4] of float32 has 40 bytes");
    assert!(backend.vector(&[cut]).is_err());
    let other = Stored::new(&[1.0; 10], 2, DType::F32);
    let error = backend.matrix(&[stored.tensor(), other.tensor()], DType::F32).err().unwrap().to_string();
    assert_eq!(error, "the parts of a matrix have 4 and 5 columns");
}
