pub struct ChatTemplate;
