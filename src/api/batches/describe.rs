//! What the API's description says of files and batches.

use super::anthropic::{MessageBatch, MessageBatchDeleted, MessageBatchFields, MessageBatchList};
use super::files::{FileDeleted, FileList, FileObject};
use super::openai::{BatchFields, BatchList, BatchObject};
use crate::anthropic::describe::MessageError;
use crate::openapi::{Operation, Tag};
use serde_json::{Value, json};

const OFF: &str = "403 where batches.folder is not set.";

fn operation(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Batches, id, summary).about(OFF).fails(&[403, 429, 500])
}

fn limit(default: u64, most: u64) -> Value {
    json!({"type": "integer", "minimum": 1, "maximum": most, "default": default})
}

fn text() -> Value {
    json!({"type": "string"})
}

pub fn upload_file() -> Operation {
    let schema = json!({
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary", "description": "The content, with a file name."},
            "purpose": {"type": "string", "enum": ["batch"]},
            "expires_after[anchor]": {
                "type": "string",
                "enum": ["created_at"],
                "description": "Together with expires_after[seconds].",
            },
            "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
        },
        "required": ["file", "purpose"],
        // A part's name is in quotes in a header. Other parts are left out.
        "propertyNames": {"pattern": r#"^[^\\\x00-\x1f\x7f]*$"#},
    });
    operation("upload_file", "Uploads the input of a batch: a request in each line")
        .about(format!("{OFF} 413 beyond batches.max_file_mib."))
        .form("FileUpload", schema)
        .answers::<FileObject>("The file.")
}

pub fn list_files() -> Operation {
    operation("list_files", "The files of the key")
        .query_parameter("after", "The id of a file: the page begins behind it.", text())
        .query_parameter("limit", "Files of a page.", limit(10_000, 10_000))
        .query_parameter("order", "By the time of creation.", json!({"enum": ["asc", "desc"], "default": "desc"}))
        .query_parameter("purpose", "Only files of this purpose: batch or batch_output.", text())
        .fails(&[400])
        .answers::<FileList>("A page of them.")
}

const FILE: &str = "A file's id.";
const BATCH: &str = "A batch's id.";

pub fn retrieve_file() -> Operation {
    operation("retrieve_file", "What is known of a file").path_parameter("id", FILE).answers::<FileObject>("The file.")
}

pub fn delete_file() -> Operation {
    operation("delete_file", "Deletes a file. Batches that were made of it go on")
        .path_parameter("id", FILE)
        .answers::<FileDeleted>("It is gone.")
}

pub fn file_content() -> Operation {
    operation("file_content", "The content of a file").path_parameter("id", FILE).answers_bytes()
}

pub fn create_batch() -> Operation {
    operation("create_batch", "Answers the requests of a file, behind those of clients that wait")
        .body("BatchRequest")
        .fields::<BatchFields>()
        .requires(&["input_file_id", "endpoint", "completion_window"])
        .answers::<BatchObject>("The batch, which is validated next.")
}

pub fn list_batches() -> Operation {
    operation("list_batches", "The batches of the key, newest first")
        .query_parameter("after", "The id of a batch: the page begins behind it.", text())
        .query_parameter("limit", "Batches of a page.", limit(20, 100))
        .fails(&[400])
        .answers::<BatchList>("A page of them.")
}

pub fn retrieve_batch() -> Operation {
    operation("retrieve_batch", "A batch").path_parameter("id", BATCH).answers::<BatchObject>("The batch.")
}

pub fn cancel_batch() -> Operation {
    operation("cancel_batch", "Ends a batch. What has been answered is kept")
        .path_parameter("id", BATCH)
        .fails(&[409])
        .answers::<BatchObject>("The batch, which is being cancelled.")
}

pub fn create_messages() -> Operation {
    operation("create_message_batch", "Answers requests for messages, behind those of clients that wait")
        .body("MessageBatchRequest")
        .fields::<MessageBatchFields>()
        .requires(&["requests"])
        .errors_as::<MessageError>()
        .answers::<MessageBatch>("The batch.")
}

pub fn list_messages() -> Operation {
    operation("list_message_batches", "The batches of messages of the key, newest first")
        .query_parameter("after_id", "The id of a batch: the page begins behind it.", text())
        .query_parameter("before_id", "The id of a batch: the page ends in front of it.", text())
        .query_parameter("limit", "Batches of a page.", limit(20, 1000))
        .fails(&[400])
        .errors_as::<MessageError>()
        .answers::<MessageBatchList>("A page of them.")
}

pub fn retrieve_messages() -> Operation {
    operation("retrieve_message_batch", "A batch of messages")
        .path_parameter("id", BATCH)
        .errors_as::<MessageError>()
        .answers::<MessageBatch>("The batch.")
}

pub fn cancel_messages() -> Operation {
    operation("cancel_message_batch", "Ends a batch of messages. What has been answered is kept")
        .path_parameter("id", BATCH)
        .fails(&[409])
        .errors_as::<MessageError>()
        .answers::<MessageBatch>("The batch, which is being cancelled.")
}

pub fn delete_messages() -> Operation {
    operation("delete_message_batch", "Deletes a batch of messages that has ended, with its results")
        .path_parameter("id", BATCH)
        .fails(&[409])
        .errors_as::<MessageError>()
        .answers::<MessageBatchDeleted>("It is gone.")
}

pub fn message_results() -> Operation {
    operation("message_batch_results", "The results of a batch of messages that has ended, in any order")
        .path_parameter("id", BATCH)
        .fails(&[409])
        .errors_as::<MessageError>()
        .answers_text(
            "application/x-jsonl",
            "A JSON object in each line: custom_id, and result of type succeeded (with message), errored (with \
             error), canceled or expired.",
        )
}
