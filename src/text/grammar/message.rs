//! Messages of `llguidance` as those of this library.

/// A message of `llguidance` in one line, without its notes for those who debug it.
pub(super) fn one_line(message: &str) -> String {
    let notes = ["<backtrace>", "<state>", "<non-verbose/>"];
    let end = notes.iter().filter_map(|note| message.find(note)).min();
    let message = message[..end.unwrap_or(message.len())].trim();
    let mut lines = message.lines();
    let mut text = lines.next().unwrap_or_default().trim().to_owned();
    // A parser of regular expressions draws the place, and then says what is wrong.
    if let Some(what) = lines.find_map(|line| line.trim().strip_prefix("error: ")) {
        text = format!("{}: {what}", text.trim_end_matches(':'));
    }
    // A feature of that crate is none of this library's.
    text.replace(" without 'referencing' feature", "")
}

/// A message on a regular expression alone, without the place in the grammar that was made of it.
pub(super) fn on_regex(message: &str) -> &str {
    let place = message
        .strip_prefix("at ")
        .and_then(|rest| rest.split_once("): "));
    let text = place.map_or(message, |(_, text)| text);
    let text = text
        .rsplit_once("(in regex): ")
        .map_or(text, |(_, text)| text);
    text.split_once(" in regex /")
        .map_or(text, |(text, _)| text)
}
