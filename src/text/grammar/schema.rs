//! JSON schemas as grammars, and the place of what a schema has wrong.

use std::time::Duration;

use llguidance::api::{GrammarInit, TopLevelGrammar};
use serde_json::{Map, Value};

use super::limits::MOST_PROPERTIES;
use super::message::one_line;
use super::regex;
use super::vocabulary::GrammarVocabulary;
use crate::base::error::bail;
use crate::base::{Result, threads};
use crate::text::grammar_source::with_white_space;

/// Keywords whose value is a schema.
const ONE: [&str; 12] = [
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "contentSchema",
    "not",
    "if",
    "then",
    "else",
];
/// Keywords whose value is a list of schemas.
const LIST: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
/// Keywords whose value has schemas by name. Those that others refer to come last.
const NAMED: [&str; 5] = [
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
];
/// Keywords whose value a reference may name.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Refuses a schema that would take long to compile.
pub(super) fn check(schema: &Value) -> Result<()> {
    let mut left = vec![(String::new(), schema)];
    while let Some((pointer, schema)) = left.pop() {
        let properties = schema.get("properties").and_then(Value::as_object);
        if let Some(count) = properties.map(Map::len).filter(|&n| n > MOST_PROPERTIES) {
            bail!(
                InvalidArgument,
                "{pointer}/properties: an object of {count} properties, and at most {MOST_PROPERTIES} are compiled"
            );
        }
        let pattern = schema.get("pattern").and_then(Value::as_str);
        let names = schema.get("patternProperties").and_then(Value::as_object);
        let names = names.into_iter().flat_map(Map::keys);
        for text in pattern.into_iter().chain(names.map(String::as_str)) {
            regex::check_repetitions(text)
                .map_err(|e| e.within(format_args!("{pointer}: pattern '{text}'")))?;
        }
        let inner = children(schema).into_iter();
        left.extend(inner.map(|(step, inner)| (format!("{pointer}{step}"), inner)));
    }
    Ok(())
}

/// The grammar of a schema.
pub(super) fn grammar(schema: Value) -> Result<TopLevelGrammar> {
    let schema = match schema {
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => bail!(InvalidArgument, "the schema is false, which no value fits"),
        Value::Object(schema) => schema,
        other => bail!(
            InvalidArgument,
            "a schema is an object or a boolean, not {other}"
        ),
    };
    let schema = Value::Object(with_white_space(schema)?);
    Ok(TopLevelGrammar::from_json_schema(schema))
}

/// Whether `schema` fails with `message` by itself.
fn fails_with(vocabulary: &GrammarVocabulary, schema: Value, message: &str) -> bool {
    let Ok(grammar) = grammar(schema) else {
        return false;
    };
    let environment = vocabulary.factory().tok_env().clone();
    let limits = vocabulary.factory().limits().clone();
    let result = GrammarInit::Serialized(grammar).validate(Some(environment), limits);
    result
        .into_error()
        .is_some_and(|error| one_line(&error) == message)
}

/// The place, as a JSON pointer, of the innermost schema that fails with `message` by itself; `None` if only the whole does.
pub(super) fn place(
    vocabulary: &GrammarVocabulary,
    schema: &Value,
    message: &str,
    until: Duration,
) -> Option<String> {
    let (mut at, mut pointer) = (schema, String::new());
    // The search is part of compiling, and is left when its thread has taken that much time.
    while let Some((step, inner)) = children(at).into_iter().find(|(_, inner)| {
        threads::processor_time() < until
            && fails_with(vocabulary, with_definitions(inner, schema), message)
    }) {
        pointer.push_str(&step);
        at = inner;
    }
    (!pointer.is_empty()).then_some(pointer)
}

/// The schemas directly in `schema`, each with the end of its JSON pointer.
fn children(schema: &Value) -> Vec<(String, &Value)> {
    let is_schema = |value: &Value| value.is_object() || value.is_boolean();
    let mut found = Vec::new();
    let Value::Object(schema) = schema else {
        return found;
    };
    for key in ONE {
        found.extend(schema.get(key).map(|inner| (format!("/{key}"), inner)));
    }
    for key in LIST {
        if let Some(Value::Array(list)) = schema.get(key) {
            let each = list.iter().enumerate();
            found.extend(each.map(|(i, inner)| (format!("/{key}/{i}"), inner)));
        }
    }
    for key in NAMED {
        if let Some(Value::Object(named)) = schema.get(key) {
            let escaped = |name: &str| name.replace('~', "~0").replace('/', "~1");
            let each = named.iter();
            found.extend(each.map(|(name, inner)| (format!("/{key}/{}", escaped(name)), inner)));
        }
    }
    found.retain(|(_, inner)| is_schema(inner));
    found
}

/// `inner` with the definitions and the dialect of the whole schema.
fn with_definitions(inner: &Value, whole: &Value) -> Value {
    let mut inner = inner.clone();
    if let (Value::Object(inner), Value::Object(whole)) = (&mut inner, whole) {
        for key in DEFINITIONS.iter().chain(&["$schema", "x-guidance"]) {
            if let (Some(value), None) = (whole.get(*key), inner.get(*key)) {
                inner.insert((*key).to_owned(), value.clone());
            }
        }
    }
    inner
}
