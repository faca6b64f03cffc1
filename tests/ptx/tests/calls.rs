//! Calls of functions, as nvcc writes them for `__noinline__` functions and `assert`.

use ptx_interpreter::findings::FindingKind;
use ptx_interpreter::{GpuOptions, GridLaunch, LaunchReport, Module, PtxResult, VirtualGpu};

/// `out[i] = body(i)` for 32 threads, with functions before the kernel. `%r1`: the thread; `%r2`: the result.
fn module(functions: &str, body: &str) -> PtxResult<Module> {
    Module::parse(&format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n{functions}
         .visible .entry test(.param .u64 out)\n{{\n.reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .pred %p<2>;
         ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
         mov.u32 %r2, 7;\n{body}\nst.global.u32 [%rd3], %r2;\nret;\n}}"
    ))
}

fn run(module: &Module) -> (LaunchReport, Vec<u32>) {
    let mut gpu = VirtualGpu::new(GpuOptions::default());
    let out = gpu.memory.allocate(128);
    let report = gpu.launch(module, "test", &GridLaunch::new([1; 3], [32, 1, 1], 0), &out.to_le_bytes()).unwrap();
    let words = gpu.memory.read(out, 128);
    (report, words.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// Subtracts 10 from what is larger, in another block of code that returns early.
const LOWER: &str = ".func (.param .b32 func_retval0) lower(.param .b32 lower_param_0)
    {
        .reg .b32 %r<3>; .reg .pred %p<2>;
        ld.param.u32 %r1, [lower_param_0];
        setp.lt.u32 %p1, %r1, 10;
        @%p1 bra SMALL;
        sub.u32 %r2, %r1, 10; st.param.b32 [func_retval0+0], %r2; ret;
        SMALL: st.param.b32 [func_retval0+0], %r1; ret;
    }";
/// Calls it twice.
const TWICE: &str = ".func (.param .b32 func_retval0) twice(.param .b32 twice_param_0)
    {
        .reg .b32 %r<4>;
        ld.param.u32 %r1, [twice_param_0];
        { .param .b32 param0; st.param.b32 [param0+0], %r1; .param .b32 retval0;
          call.uni (retval0), lower, (param0); ld.param.b32 %r2, [retval0+0]; }
        { .param .b32 param0; st.param.b32 [param0+0], %r2; .param .b32 retval0;
          call.uni (retval0), lower, (param0); ld.param.b32 %r3, [retval0+0]; }
        st.param.b32 [func_retval0+0], %r3;
        ret;
    }";

fn call(function: &str, guard: &str) -> String {
    format!(
        "{{ .param .b32 param0; st.param.b32 [param0+0], %r1; .param .b32 retval0; st.param.b32 [retval0+0], %r2;
           {guard} call (retval0), {function}, (param0); ld.param.b32 %r2, [retval0+0]; }}"
    )
}

#[test]
fn functions_call_functions_and_lanes_return_apart() {
    let (report, words) = run(&module(&format!("{LOWER}\n{TWICE}"), &call("twice", "")).unwrap());
    assert_eq!(report.failure(), None);
    let lower = |x: u32| if x < 10 { x } else { x - 10 };
    assert_eq!(words, (0..32).map(|x| lower(lower(x))).collect::<Vec<_>>());
}

#[test]
fn lanes_whose_guard_is_false_do_not_call() {
    let body = format!("setp.lt.u32 %p1, %r1, 16;\n{}", call("lower", "@%p1"));
    let (report, words) = run(&module(LOWER, &body).unwrap());
    assert_eq!(report.failure(), None);
    assert_eq!(words, (0..32).map(|x| if x >= 16 { 7 } else { x % 10 }).collect::<Vec<_>>());
}

#[test]
fn what_cannot_be_called_is_named() {
    let error =
        |functions: &str, function: &str| module(functions, &call(function, "")).map(|_| ()).unwrap_err().to_string();
    let declared = ".extern .func (.param .b32 func_retval0) far(.param .b32 far_param_0);";
    assert!(error(declared, "far").contains("far is not defined in the module"), "{}", error(declared, "far"));
    let recursive = TWICE.replace("lower,", "twice,");
    assert!(error(&recursive, "twice").contains("twice calls itself"), "{}", error(&recursive, "twice"));
    let other = LOWER.replace(".param .b32 lower_param_0", ".param .b32 lower_param_0, .param .b32 lower_param_1");
    assert!(error(&other, "lower").contains("arguments and results of lower"), "{}", error(&other, "lower"));
}

#[test]
fn a_failing_assertion_ends_the_launch() {
    let declared =
        ".extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);";
    let body = |limit: u32| {
        format!(
            "setp.lt.u32 %p1, %r1, {limit}; @%p1 bra FINE;
             {{ .param .b64 param0; st.param.b64 [param0+0], %rd1; .param .b32 param1; st.param.b32 [param1+0], 9;
                call.uni __assertfail, (param0, param0, param1, param0, param0); }} FINE:"
        )
    };
    let (report, _) = run(&module(declared, &body(32)).unwrap());
    assert_eq!(report.failure(), None);
    let (report, _) = run(&module(declared, &body(31)).unwrap());
    let [finding] = &report.findings[..] else { panic!("{:?}", report.findings) };
    assert_eq!((finding.kind, &*finding.message, finding.at.thread), (FindingKind::Trap, "an assertion fails", 31));
}
