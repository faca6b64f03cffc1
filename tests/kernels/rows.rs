//! Norms, residuals, activations, gathering.

use crate::support::*;
use pagetide_backend::cpu::{CpuBackend, CpuVector, Isa};
use pagetide_backend::{Activation, AttentionShape, Backend, Batch, DType, Norm, NormKind, TensorRole};
use proptest::prelude::*;

fn vector(backend: &CpuBackend, values: &[f32]) -> CpuVector {
    backend.vector(&[Stored::new(values, 1, DType::F32).tensor()]).unwrap()
}

fn norm_reference(x: &[f64], kind: NormKind, weight: &[f32], bias: Option<&[f32]>) -> Vec<f64> {
    let n = x.len() as f64;
    let (mean, eps) = match kind {
        NormKind::Rms { eps } => (0.0, eps),
        NormKind::Layer { eps } => (x.iter().sum::<f64>() / n, eps),
    };
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    let scale = 1.0 / (variance + f64::from(eps)).sqrt();
    let bias = |i: usize| bias.map_or(0.0, |bias| f64::from(bias[i]));
    x.iter().enumerate().map(|(i, x)| (x - mean) * scale * f64::from(weight[i]) + bias(i)).collect()
}

/// All logits are within the cap afterwards, and small ones are hardly changed.
#[test]
fn logits_are_capped() {
    let values = [0.0, 1e-3, -0.5, 3.0, -7.5, 29.0, -31.0, 88.0, 1e4, -1e30, f32::INFINITY];
    let cap = 30.0;
    let expected: Vec<f64> = values.iter().map(|x| f64::from(cap) * (f64::from(*x) / f64::from(cap)).tanh()).collect();
    for isa in isas() {
        let mut backend = backend(isa, 2);
        let head = backend.matrix(&[Stored::new(&values, values.len(), DType::F32).tensor()], DType::F32).unwrap();
        let x = tensor(&backend, &[1.0, -1.0], 1);
        backend.begin(&plain_batch(2));
        backend.logits(&x, 2, &head, None);
        backend.cap_logits(cap);
        let logits = backend.read_logits();
        assert_close(&logits[..values.len()], &expected, 1e-5, &format!("{isa}"));
        let negated: Vec<f64> = expected.iter().map(|x| -x).collect();
        assert_close(&logits[values.len()..], &negated, 1e-5, &format!("{isa}"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn norms_are_right(cols in 1usize..300, rows in 1usize..100, layer: bool, threads in 1usize..4, seed: u64) {
        let mut numbers = Numbers::new(seed);
        let (x, delta) = (numbers.vec(rows * cols), numbers.vec(rows * cols));
        let (weight, bias) = (numbers.vec(cols), numbers.vec(cols));
        let kind = if layer { NormKind::Layer { eps: 1e-5 } } else { NormKind::Rms { eps: 1e-6 } };
        let bias = layer.then_some(bias);
        let sum: Vec<f32> = x.iter().zip(&delta).map(|(x, delta)| x + delta).collect();
        let reference = |x: &[f32]| -> Vec<f64> {
            let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            wide.chunks_exact(cols).flat_map(|row| norm_reference(row, kind, &weight, bias.as_deref())).collect()
        };
        for isa in isas() {
            let mut backend = backend(isa, threads);
            let norm = Norm { kind, weight: vector(&backend, &weight), bias: bias.as_ref().map(|b| vector(&backend, b)) };
            let (mut x_tensor, delta) = (tensor(&backend, &x, cols), tensor(&backend, &delta, cols));
            let mut out = backend.tensor(rows, cols, TensorRole::Activation).unwrap();
            backend.begin(&plain_batch(rows));
            backend.norm(&x_tensor, &norm, &mut out);
            assert_close(out.as_slice(), &reference(&x), 1e-4, "norm");
            backend.add_norm(&mut x_tensor, &delta, &norm, &mut out);
            assert_eq!(&x_tensor.as_slice()[..rows * cols], &sum[..]);
            assert_close(out.as_slice(), &reference(&sum), 1e-4, "add_norm");
            // The last row alone, by one thread.
            let fused = out.as_slice()[(rows - 1) * cols..].to_vec();
            let last = tensor(&backend, &sum[(rows - 1) * cols..], cols);
            backend.begin(&plain_batch(1));
            backend.norm(&last, &norm, &mut out);
            assert_eq!(bits(&out.as_slice()[..cols]), bits(&fused));
        }
    }

    #[test]
    fn qk_norm_is_per_head(rows in 1usize..5, num_kv_heads in 1usize..3, group in 1usize..4, seed: u64) {
        let shape = AttentionShape { num_heads: num_kv_heads * group, num_kv_heads, head_dim: 24, scale: 1.0, softcap: None, window: None };
        let cols = (shape.num_heads + 2 * num_kv_heads) * 24;
        let mut numbers = Numbers::new(seed);
        let (qkv, q, k) = (numbers.vec(rows * cols), numbers.vec(24), numbers.vec(24));
        let kind = NormKind::Rms { eps: 1e-6 };
        for isa in isas() {
            let mut backend = backend(isa, 2);
            let norm = |backend: &CpuBackend, w: &[f32]| Norm { kind, weight: vector(backend, w), bias: None };
            let mut out = tensor(&backend, &qkv, cols);
            let (q_norm, k_norm) = (norm(&backend, &q), norm(&backend, &k));
            backend.begin(&plain_batch(rows));
            backend.qk_norm(&mut out, &shape, &q_norm, &k_norm);
            for (i, (got, head)) in out.as_slice().chunks_exact(24).zip(qkv.chunks_exact(24)).enumerate() {
                let wide: Vec<f64> = head.iter().map(|x| f64::from(*x)).collect();
                let index = i % (shape.num_heads + 2 * num_kv_heads);
                if index < shape.num_heads {
                    assert_close(got, &norm_reference(&wide, kind, &q, None), 1e-5, "q");
                } else if index < shape.num_heads + num_kv_heads {
                    assert_close(got, &norm_reference(&wide, kind, &k, None), 1e-5, "k");
                } else {
                    assert_eq!(got, head);
                }
            }
        }
    }
}

/// `1 - erf(x)` for `x >= 0`, by its continued fraction or, near 0, the series of erf.
fn erfc(x: f64) -> f64 {
    if x < 2.0 {
        let (mut term, mut sum) = (x, x);
        for n in 1..60 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return 1.0 - sum * 2.0 / std::f64::consts::PI.sqrt();
    }
    let fraction = (1..60).rev().fold(0.0, |rest, n| f64::from(n) / 2.0 / (x + rest));
    (-x * x).exp() / std::f64::consts::PI.sqrt() / (x + fraction)
}

fn activation_reference(x: f64, kind: Activation) -> f64 {
    match kind {
        Activation::Relu => x.max(0.0),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        }
        Activation::Gelu => {
            let tail = 0.5 * erfc(x.abs() / std::f64::consts::SQRT_2);
            x * if x < 0.0 { tail } else { 1.0 - tail }
        }
    }
}

#[test]
fn activations_are_right() {
    let kinds = [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu];
    for cols in [1, 16, 45, 1000] {
        for isa in isas() {
            let mut backend = backend(isa, 3);
            let mut numbers = Numbers::new(cols as u64);
            let gate: Vec<f32> = numbers.vec(20 * cols).into_iter().map(|x| x * 12.0).collect();
            let up = numbers.vec(20 * cols);
            let rows = gate.chunks_exact(cols).zip(up.chunks_exact(cols));
            let both: Vec<f32> = rows.flat_map(|(gate, up)| [gate, up].concat()).collect();
            backend.begin(&plain_batch(20));
            for kind in kinds {
                let expected: Vec<f64> = gate.iter().map(|x| activation_reference(f64::from(*x), kind)).collect();
                let mut x = tensor(&backend, &gate, cols);
                backend.activation(&mut x, kind);
                assert_close(&x.as_slice()[..20 * cols], &expected, 1e-6, &format!("{isa} {kind:?}"));
                let gate_up = tensor(&backend, &both, 2 * cols);
                let mut out = backend.tensor(20, cols, TensorRole::Activation).unwrap();
                backend.gated_activation(&gate_up, kind, &mut out);
                let expected: Vec<f64> = expected.iter().zip(&up).map(|(x, up)| x * f64::from(*up)).collect();
                assert_close(out.as_slice(), &expected, 1e-6, &format!("{isa} gated {kind:?}"));
            }
        }
    }
}

#[test]
fn activations_of_huge_inputs_end_well() {
    for isa in isas() {
        let mut backend = backend(isa, 1);
        backend.begin(&plain_batch(1));
        for kind in [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu] {
            let mut x = tensor(&backend, &[-1e30, -1000.0, 0.0, 1000.0, 1e30], 5);
            backend.activation(&mut x, kind);
            let got = &x.as_slice()[..5];
            assert!(got[0].abs() < 1e-6 && got[1].abs() < 1e-6, "{isa} {kind:?}: {got:?}");
            assert_eq!(&got[2..], &[0.0, 1000.0, 1e30], "{isa} {kind:?}");
        }
    }
}

#[test]
fn gated_rows_are_added() {
    for cols in [1, 16, 45, 1000] {
        let mut numbers = Numbers::new(cols as u64);
        let [x, from, out] = [(); 3].map(|()| numbers.vec(7 * cols));
        let gate = numbers.vec(cols);
        let wide = |x: &f32| f64::from(*x);
        let rows = x.chunks_exact(cols).zip(from.chunks_exact(cols)).zip(out.chunks_exact(cols));
        let expected: Vec<f64> = rows
            .flat_map(|((x, from), out)| {
                let dot: f64 = x.iter().zip(&gate).map(|(x, gate)| wide(x) * wide(gate)).sum();
                let part = 1.0 / (1.0 + (-dot).exp());
                out.iter().zip(from).map(move |(out, from)| wide(out) + part * wide(from))
            })
            .collect();
        for isa in isas() {
            let mut backend = backend(isa, 3);
            let (x, from, mut out) =
                (tensor(&backend, &x, cols), tensor(&backend, &from, cols), tensor(&backend, &out, cols));
            backend.begin(&plain_batch(7));
            backend.add_gated(&x, &vector(&backend, &gate), &from, &mut out);
            assert_close(&out.as_slice()[..7 * cols], &expected, 1e-4, &format!("{isa}"));
        }
    }
}

#[test]
fn rows_are_added_and_gathered() {
    let mut backend = backend(Isa::detect(), 2);
    let x: Vec<f32> = (0..12).map(|i| i as f32).collect();
    let mut t = tensor(&backend, &x, 3);
    let delta = tensor(&backend, &[100.0; 12], 3);
    let mut out = backend.tensor(2, 3, TensorRole::Activation).unwrap();
    backend.begin(&Batch { logit_rows: vec![2, 3, 1], ..plain_batch(4) });
    backend.gather_rows(&t, 1, 2, &mut out);
    assert_eq!(out.as_slice(), &[9.0, 10.0, 11.0, 3.0, 4.0, 5.0]);
    backend.add(&mut t, &delta);
    assert_eq!(&t.as_slice()[..3], &[100.0, 101.0, 102.0]);
    assert_eq!(t.as_slice()[11], 111.0);
    assert!(t.as_slice()[12..].iter().all(|x| x.is_nan()));
}
