//! The table of instructions in `docs/ptx.md` is that of the decoder. `UPDATE_DOCS=1` writes it.

use ptx_interpreter::table;
use std::path::Path;

const BEGIN: &str = "<!-- instructions -->\n";
const END: &str = "<!-- end of instructions -->\n";

#[test]
fn the_page_has_the_table_of_the_decoder() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/ptx.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let start = page.find(BEGIN).expect("the page marks where the table begins") + BEGIN.len();
    let end = page.find(END).expect("the page marks where the table ends");
    let expected = format!("{}\n{}\n{}", &page[..start], table::markdown(), &page[end..]);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, expected).unwrap();
    } else {
        assert!(
            page == expected,
            "docs/ptx.md is not up to date: UPDATE_DOCS=1 cargo test -p ptx-interpreter --test docs"
        );
    }
}
