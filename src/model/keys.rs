//! Checked access to the values of a `config.json`. Errors name the key, its value and the expected value.

use serde_json::{Map, Value};

use crate::base::Result;
use crate::base::error::{bail, err};

/// Larger sizes are a mistake or an attack, and their products would overflow.
pub(crate) const LARGEST: u64 = 1 << 28;

/// A JSON object with checked access; null counts as absent.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a>(pub(crate) &'a Map<String, Value>);

impl<'a> Keys<'a> {
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|v| !v.is_null())
    }

    pub(crate) fn size(&self, name: &str) -> Result<Option<usize>> {
        match self.get(name) {
            None => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) if (1..=LARGEST).contains(&n) => Ok(Some(n as usize)),
                _ => bail!(
                    CorruptFile,
                    "config: '{name}' is {v}; expected a whole number from 1 to {LARGEST}"
                ),
            },
        }
    }

    /// A required size.
    pub(crate) fn required_size(&self, name: &str) -> Result<usize> {
        self.size(name)?
            .ok_or_else(|| err!(CorruptFile, "config: '{name}' is missing"))
    }

    /// A whole number, which may be 0.
    pub(crate) fn count(&self, name: &str) -> Result<Option<usize>> {
        match self.get(name) {
            None => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) if n <= LARGEST => Ok(Some(n as usize)),
                _ => bail!(
                    CorruptFile,
                    "config: '{name}' is {v}; expected a whole number up to {LARGEST}"
                ),
            },
        }
    }

    /// Positions of an attention window. 0 means none: some converters, and mixtures saved by transformers 5, write it.
    pub(crate) fn window(&self, name: &str) -> Result<Option<usize>> {
        Ok(self.count(name)?.filter(|&window| window > 0))
    }

    /// A list of whole numbers.
    pub(crate) fn counts(&self, name: &str) -> Result<Option<Vec<usize>>> {
        self.list(name, "whole numbers", |v| v.as_u64().map(|n| n as usize))
    }

    /// A list of numbers.
    pub(crate) fn numbers(&self, name: &str) -> Result<Option<Vec<f64>>> {
        self.list(name, "numbers", Value::as_f64)
    }

    /// A list of texts.
    pub(crate) fn texts(&self, name: &str) -> Result<Option<Vec<&'a str>>> {
        self.list(name, "texts", Value::as_str)
    }

    fn list<T>(
        &self,
        name: &str,
        what: &str,
        of: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let items = value
            .as_array()
            .map(|items| items.iter().map(&of).collect::<Option<Vec<T>>>());
        match items.flatten() {
            Some(items) => Ok(Some(items)),
            None => bail!(
                CorruptFile,
                "config: '{name}' is {value}; expected a list of {what}"
            ),
        }
    }

    pub(crate) fn number(&self, name: &str) -> Result<Option<f64>> {
        match self.get(name) {
            None => Ok(None),
            Some(v) => match v.as_f64() {
                Some(x) => Ok(Some(x)),
                None => bail!(CorruptFile, "config: '{name}' is {v}; expected a number"),
            },
        }
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(v) => bail!(CorruptFile, "config: '{name}' is {v}; expected a text"),
        }
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(v) => bail!(
                CorruptFile,
                "config: '{name}' is {v}; expected true or false"
            ),
        }
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<Keys<'a>>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Keys(map))),
            Some(v) => bail!(CorruptFile, "config: '{name}' is {v}; expected an object"),
        }
    }

    /// A token id or a list of them.
    pub(crate) fn ids(&self, name: &str) -> Result<Vec<u32>> {
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(value) => token_ids(value).ok_or_else(|| {
                err!(
                    CorruptFile,
                    "config: '{name}' is {value}; expected token ids"
                )
            }),
        }
    }
}

/// The token ids in `value`: one, or a list. Negative ones, by which files say that there is none, are left out.
pub(crate) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let all = match value {
        Value::Array(list) => &list[..],
        one => std::slice::from_ref(one),
    };
    let is_none = |v: &&Value| v.as_i64().is_some_and(|n| n < 0);
    let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    all.iter().filter(|v| !is_none(v)).map(id).collect()
}
