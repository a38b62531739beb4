//! Prints warnings of the library on standard error, each once.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber, span};

/// Prints the library's warnings from now on.
pub(super) fn show() {
    // Only a program that links this command as a library could have set another one.
    let _ = tracing::subscriber::set_global_default(ToTerminal::default());
}

#[derive(Default)]
struct ToTerminal {
    said: Mutex<HashSet<String>>,
}

/// Modules whose warnings subcommands print themselves: those of sessions and of chat templates.
const TOLD: [&str; 3] = ["NVFP4::session", "NVFP4::text", "NVFP4::model::text"];

/// Whether events are shown.
fn is_shown(metadata: &Metadata<'_>) -> bool {
    let target = metadata.target();
    metadata.is_event()
        && *metadata.level() == Level::WARN
        && target.starts_with("NVFP4")
        && !TOLD.iter().any(|module| target.starts_with(module))
}

impl Subscriber for ToTerminal {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        match is_shown(metadata) {
            true => Interest::always(),
            false => Interest::never(),
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        is_shown(metadata)
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = Message::default();
        event.record(&mut message);
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.insert(message.0.clone()) {
            eprintln!("nvfp4: warning: {}", message.0);
        }
    }
}

/// The message of an event.
#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}
