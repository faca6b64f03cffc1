fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cfg=kernels_alone");
    println!("cargo::rustc-check-cfg=cfg(kernels_alone)");
}
