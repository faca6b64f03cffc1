pub fn is_gbnf(text: &str) -> bool {
    text.contains("::=")
}
pub fn to_lark(_text: &str) -> Result<String, String> {
    Err("not yet".into())
}
