//! Queues: many generations, and no thread of the host for each
//!
//! A queue of a model runs generations that are submitted to it, and lists their events: tokens, text, and the end of each generation. A
//! program of one thread submits as many as it likes and takes the events when it likes; a file descriptor that is readable while there
//! are any makes a queue part of a loop on epoll, libuv or asyncio. Generations of all queues, and of calls of other threads, are run in
//! the same passes over the weights.
//!
//! From its submission until the #NVFP4_EVENT_END of its generation, a session is in use: calls on it fail with #NVFP4_BUSY, except those
//! that may read it during a call. It can be used again as soon as that event can be taken. NVFP4_session_text(),
//! NVFP4_session_result() and the like then say what the generation left.
//!
//! Each running generation has a thread of the library, which blocks all signals. Events wait in memory until they are taken; with as
//! many as `events` of the options, generations pause until some are.

use std::ffi::{c_char, c_void};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use super::arguments::{Element, Growing, Out, count, elements_out, fill, options, slice, text};
use super::call::{Cancellation, NVFP4_CallOptions};
use super::chat::NVFP4_ChatOptions;
use super::guard::{attempted, enter, enter_to_free};
use super::handle::{self, Object};
use super::model::{NVFP4_Model, token_out, tokens_in};
use super::session::{
    EventProbabilities, NVFP4_EVENT_TEXT, NVFP4_EVENT_TOKEN, NVFP4_FINISH_NONE,
    NVFP4_GenerateOptions, NVFP4_PART_CONTENT, NVFP4_Session, Session, finish_number, part_number,
};
use super::status::{NVFP4_OK, NVFP4_Status};
use crate::base::error::{Result, bail};
use crate::base::memory::copied;
use crate::engine::Served;
use crate::session::{
    self, GenerateOptions, Generation, Happened, Piece, QueueEvent, QueueOptions, Submission,
};
use crate::text::messages_from_json;

/// A queue of a model. See the chapter on queues.
pub struct NVFP4_Queue {
    _private: [u8; 0],
}

struct Queue {
    model: Arc<Served>,
    queue: session::Queue,
    /// The events that the last wait gave, whose texts the host reads until the next one.
    taken: Mutex<Vec<QueueEvent>>,
}

impl Object for Queue {
    type Handle = NVFP4_Queue;
    const NAME: &'static str = "NVFP4_Queue";
}

/// Limits of a queue. Fill with NVFP4_queue_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_QueueOptions {
    /// sizeof(NVFP4_QueueOptions) as the caller knows it.
    pub struct_size: u32,
    /// The most generations that run at a time; others wait for one of them to end. Default: 256.
    pub running: i32,
    /// The most submissions that have not ended, running ones included. A further one is refused with #NVFP4_BUSY. Default: 4,096.
    pub submissions: usize,
    /// The most events that wait to be taken. Default: 65,536.
    pub events: usize,
}

// SAFETY: integers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_QueueOptions {
    const NAME: &'static str = "NVFP4_QueueOptions";
    fn defaults() -> Self {
        let QueueOptions {
            running,
            submissions,
            events,
        } = QueueOptions::default();
        NVFP4_QueueOptions {
            struct_size: size_of::<Self>() as u32,
            running: running as i32,
            submissions,
            events,
        }
    }
}

/// How to run a generation in a queue. Fill with NVFP4_submit_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_SubmitOptions {
    /// sizeof(NVFP4_SubmitOptions) as the caller knows it.
    pub struct_size: u32,
    /// A waiting generation of a higher priority starts first; of equal ones, the one that was submitted first. Running generations are not
    /// interrupted. Default: 0.
    pub priority: i32,
    /// Seconds after which the generation ends as #NVFP4_FINISH_DEADLINE, counted from its submission. Default: 0, never.
    pub deadline: f64,
    /// Given back in each event of the generation. Default: NULL.
    pub user: *mut c_void,
}

// SAFETY: numbers and a pointer without padding, the first a u32 size.
unsafe impl Growing for NVFP4_SubmitOptions {
    const NAME: &'static str = "NVFP4_SubmitOptions";
    fn defaults() -> Self {
        NVFP4_SubmitOptions {
            struct_size: size_of::<Self>() as u32,
            priority: 0,
            deadline: 0.0,
            user: std::ptr::null_mut(),
        }
    }
}

impl NVFP4_SubmitOptions {
    /// The time at which a generation that is submitted now ends.
    fn deadline(&self) -> Result<Option<Instant>> {
        match Duration::try_from_secs_f64(self.deadline) {
            Ok(Duration::ZERO) => Ok(None),
            // Too far away to be reached is as good as never.
            Ok(time) => Ok(Instant::now().checked_add(time)),
            Err(_) if self.deadline > 0.0 => Ok(None),
            Err(_) => bail!(
                InvalidArgument,
                "deadline is {} seconds; it takes a positive number, or 0 for none",
                self.deadline
            ),
        }
    }
}

/// The end of a generation in a queue, whose last event this is.
pub const NVFP4_EVENT_END: i32 = 2;

/// An event of a generation in a queue.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_QueueEvent {
    /// The number of the generation, which its submission gave.
    pub generation: u64,
    /// `user` of its submission.
    pub user: *mut c_void,
    /// The new text, as in an #NVFP4_TokenEvent; at the end of a generation that failed, the message of its error. Valid until the next
    /// wait on this queue, or the queue's release.
    pub text: *const c_char,
    /// Bytes of `text`.
    pub text_length: usize,
    /// One of NVFP4_EVENT_*.
    pub kind: i32,
    /// The token, or -1 if the event has none.
    pub token: i32,
    /// The kind of the text: one of NVFP4_PART_*.
    pub part: i32,
    /// The natural logarithm of the token's probability, as in an #NVFP4_TokenEvent; NaN if it was not requested.
    pub log_probability: f32,
    /// At the end, one of NVFP4_FINISH_*; otherwise, and if the generation failed, #NVFP4_FINISH_NONE.
    pub finish: i32,
    /// At the end, #NVFP4_OK or the error of a generation that failed, which leaves its session as NVFP4_session_generate() does; otherwise
    /// #NVFP4_OK.
    pub status: NVFP4_Status,
    /// The most probable tokens, as in an #NVFP4_TokenEvent. Valid as long as the text, as are their log-probabilities.
    pub top_tokens: *const i32,
    /// The natural logarithm of the probability of each of `top_tokens`.
    pub top_log_probabilities: *const f32,
    /// Elements of `top_tokens` and of `top_log_probabilities`.
    pub top_count: usize,
}

// SAFETY: numbers and pointers without padding.
unsafe impl Element for NVFP4_QueueEvent {
    const NAME: &'static str = "NVFP4_QueueEvent";
    const EARLIER: &'static [usize] = &[56];
    fn defaults() -> Self {
        NVFP4_QueueEvent {
            generation: 0,
            user: std::ptr::null_mut(),
            text: c"".as_ptr(),
            text_length: 0,
            kind: NVFP4_EVENT_END,
            token: -1,
            part: NVFP4_PART_CONTENT,
            log_probability: f32::NAN,
            finish: NVFP4_FINISH_NONE,
            status: NVFP4_OK,
            top_tokens: std::ptr::null(),
            top_log_probabilities: std::ptr::null(),
            top_count: 0,
        }
    }
}

impl NVFP4_QueueEvent {
    /// The event for the host. Its text is that of `event`.
    fn of(event: &QueueEvent) -> Result<Self> {
        let mut out = NVFP4_QueueEvent {
            generation: event.generation,
            user: std::ptr::with_exposed_provenance_mut(event.user_data),
            ..Self::defaults()
        };
        let mut set_text = |text: &str| {
            out.text = text.as_ptr().cast();
            out.text_length = text.len();
        };
        match &event.what {
            Happened::Piece {
                token,
                part,
                text,
                probabilities,
            } => {
                set_text(text);
                out.kind = match token {
                    Some(_) => NVFP4_EVENT_TOKEN,
                    None => NVFP4_EVENT_TEXT,
                };
                out.token = token.map_or(Ok(-1), token_out)?;
                out.part = part_number(*part);
                let probabilities = EventProbabilities::of(probabilities.as_ref());
                out.log_probability = probabilities.own;
                out.top_tokens = probabilities.tokens;
                out.top_log_probabilities = probabilities.values;
                out.top_count = probabilities.count;
            }
            Happened::Ended(Ok(finish)) => out.finish = finish_number(*finish),
            Happened::Ended(Err(error)) => {
                set_text(error.message());
                out.status = error.kind().status();
            }
        }
        Ok(out)
    }
}

fn get(queue: *const NVFP4_Queue) -> Result<Arc<Queue>> {
    handle::get::<Queue>("queue", queue)
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_QueueOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_options_init(
    options: *mut NVFP4_QueueOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_queue_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_QueueOptions::defaults()) }
    })
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_SubmitOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_submit_options_init(
    options: *mut NVFP4_SubmitOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_submit_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_SubmitOptions::defaults()) }
    })
}

/// Creates a queue of a model, which it keeps alive. It has no thread before its first submission. `options`: NULL for the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_create(
    model: *const NVFP4_Model,
    options: *const NVFP4_QueueOptions,
    out: *mut *mut NVFP4_Queue,
) -> NVFP4_Status {
    enter("NVFP4_queue_create", || {
        // SAFETY: the pointers are as the header asks.
        let (out, options) = unsafe { (Out::new("out", out)?, self::options(options)?) };
        let model = handle::get::<Served>("model", model)?;
        let queue = session::Queue::new(QueueOptions {
            running: count("running", options.running.into())?,
            submissions: options.submissions,
            events: options.events,
        })?;
        out.set(handle::insert(Arc::new(Queue {
            model,
            queue,
            taken: Mutex::default(),
        })));
        Ok(())
    })
}

/// Adds a reference to a queue.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_retain(queue: *mut NVFP4_Queue) -> NVFP4_Status {
    enter("NVFP4_queue_retain", || {
        handle::retain::<Queue>("queue", queue)
    })
}

/// Gives up a reference to a queue. The last one ends its generations, which keep the tokens they have, without waiting for them: each
/// session can be used again within a pass. No event of them follows. A wait on the queue fails with #NVFP4_CANCELLED.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_release(queue: *mut NVFP4_Queue) -> NVFP4_Status {
    enter_to_free("NVFP4_queue_release", || {
        if let Some(object) = handle::give_up::<Queue>("queue", queue)? {
            object.queue.close();
        }
        Ok(())
    })
}

/// The common part of the submissions; `run` is the generation.
///
/// # Safety
/// As the header says of the pointers.
unsafe fn submit(
    function: &'static str,
    is_chat: bool,
    queue: *const NVFP4_Queue,
    handle: *mut NVFP4_Session,
    generate: *const NVFP4_GenerateOptions,
    submit: *const NVFP4_SubmitOptions,
    generation: *mut u64,
    run: impl FnOnce(
        &mut session::Session,
        &GenerateOptions,
        &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation>
    + Send
    + 'static,
) -> Result<()> {
    // SAFETY: promised by the caller.
    let (out, generate, submit) = unsafe {
        (
            Out::new("generation", generation)?,
            options(generate)?,
            options(submit)?,
        )
    };
    // SAFETY: as above. The flag stays until the end of the generation.
    let (call, cancellation) = unsafe {
        (
            options::<NVFP4_CallOptions>(generate.call)?,
            Cancellation::read(generate.call)?,
        )
    };
    if call.progress.is_some() {
        bail!(
            InvalidArgument,
            "a progress callback, which a queue does not call: its events say what has run"
        );
    }
    // SAFETY: as above.
    let options = unsafe { generate.read() }?;
    let queue = get(queue)?;
    options.check(&queue.model, is_chat)?;
    let session = handle::get::<Session>("session", handle)?;
    let reserved = session.reserve()?;
    if !Arc::ptr_eq(reserved.value("session")?.session.model(), &queue.model) {
        bail!(
            InvalidArgument,
            "the session is of another model than the queue"
        );
    }
    let submitted = Instant::now();
    let work = move |on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>| {
        attempted(function, || {
            let mut state = reserved.value("session")?;
            let waited = submitted.elapsed();
            state.generate(|session| {
                let mut generation = run(session, &options, on_piece)?;
                generation.timings.add_wait(waited);
                Ok(generation)
            })
        })
    };
    let id = queue.queue.submit(Submission {
        work: Box::new(work),
        priority: submit.priority,
        deadline: submit.deadline()?,
        is_cancelled: Box::new(move || cancellation.is_set()),
        user_data: submit.user.expose_provenance(),
    })?;
    session.set_submitted(queue.queue.submitted(id));
    if handle::get::<Session>("session", handle).is_err() {
        // Another thread has released it meanwhile.
        queue.queue.cancel(id)?;
    }
    out.set(id);
    Ok(())
}

/// Submits a generation: appends tokens to a session and generates from there, as NVFP4_session_prefill() and NVFP4_session_generate() do.
/// Returns at once. A generation that fails, or ends before its first token, leaves the session as it was before.
///
/// - `tokens`, `count`: the prompt; none to generate from what the session holds. Copied.
/// - `options`: NULL for the defaults. Copied, except a cancel flag and what a `logits_processor` uses, which must stay valid until the
///   generation's end. A cancel handle may be released before. There must be no progress callback.
/// - `submit`: NULL for the defaults. Copied.
/// - `generation`: receives its number, which is not 0 and which the queue does not use again.
///
/// #NVFP4_BUSY if the session is in use, or if the queue is full.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_generate(
    queue: *const NVFP4_Queue,
    session: *mut NVFP4_Session,
    tokens: *const i32,
    count: usize,
    options: *const NVFP4_GenerateOptions,
    submit: *const NVFP4_SubmitOptions,
    generation: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_queue_generate", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let tokens = tokens_in(slice("tokens", tokens, count)?)?;
            self::submit(
                "NVFP4_queue_generate",
                false,
                queue,
                session,
                options,
                submit,
                generation,
                move |session, options, on_piece| {
                    session.generate_after(&tokens, options, on_piece)
                },
            )
        }
    })
}

/// Submits a chat turn like NVFP4_session_chat(), whose texts are copied. The rest is as for NVFP4_queue_generate().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_chat(
    queue: *const NVFP4_Queue,
    session: *mut NVFP4_Session,
    text: *const c_char,
    text_length: usize,
    chat: *const NVFP4_ChatOptions,
    options: *const NVFP4_GenerateOptions,
    submit: *const NVFP4_SubmitOptions,
    generation: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_queue_chat", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let text = copied(self::text("text", text, text_length)?)?;
            let chat = NVFP4_ChatOptions::read(chat)?;
            self::submit(
                "NVFP4_queue_chat",
                true,
                queue,
                session,
                options,
                submit,
                generation,
                move |session, options, on_piece| {
                    session.chat(&text, chat.as_ref(), options, on_piece)
                },
            )
        }
    })
}

/// Submits a chat turn like NVFP4_session_chat_messages(), whose texts are copied. The rest is as for NVFP4_queue_generate().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_chat_messages(
    queue: *const NVFP4_Queue,
    session: *mut NVFP4_Session,
    messages: *const c_char,
    messages_length: usize,
    chat: *const NVFP4_ChatOptions,
    options: *const NVFP4_GenerateOptions,
    submit: *const NVFP4_SubmitOptions,
    generation: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_queue_chat_messages", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let messages = messages_from_json(text("messages", messages, messages_length)?)?;
            let chat = NVFP4_ChatOptions::read(chat)?;
            self::submit(
                "NVFP4_queue_chat_messages",
                true,
                queue,
                session,
                options,
                submit,
                generation,
                move |session, options, on_piece| {
                    session.chat_messages(&messages, chat.as_ref(), options, on_piece)
                },
            )
        }
    })
}

/// Takes events, oldest first. Those of one generation are in order, and its #NVFP4_EVENT_END is the last. Without any it waits for one.
/// Only one call at a time may wait on a queue: another one meanwhile fails with #NVFP4_BUSY.
///
/// - `events`: room for `capacity` events, at least 1, of `event_size` bytes: sizeof(NVFP4_QueueEvent).
/// - `timeout_ms`: the longest time to wait, in milliseconds; 0 to return at once, -1 to wait for ever.
/// - `count`: receives the number of events. It is 0 after the timeout, or after NVFP4_queue_wake().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_wait(
    queue: *mut NVFP4_Queue,
    events: *mut NVFP4_QueueEvent,
    event_size: usize,
    capacity: usize,
    timeout_ms: i64,
    count: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_queue_wait", || {
        // SAFETY: the pointers are as the header asks.
        let (out, mut put) = unsafe {
            (
                Out::new("count", count)?,
                elements_out("events", events, capacity, event_size)?,
            )
        };
        let timeout = match timeout_ms {
            -1 => None,
            ms => match u64::try_from(ms) {
                Ok(ms) => Some(Duration::from_millis(ms)),
                Err(_) => bail!(
                    InvalidArgument,
                    "timeout_ms is {ms}; it takes milliseconds, 0 for none, or -1 to wait for ever"
                ),
            },
        };
        let queue = get(queue)?;
        let mut taken = match queue.taken.try_lock() {
            Ok(taken) => taken,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                // One of a parent process says so.
                queue.queue.counts()?;
                bail!(
                    Busy,
                    "queue is in use by another wait; wait for that call to return"
                );
            }
        };
        *taken = queue.queue.wait(capacity, timeout)?;
        let converted: Result<Vec<_>> = taken.iter().map(NVFP4_QueueEvent::of).collect();
        let converted = converted?;
        out.set(converted.len());
        converted
            .into_iter()
            .enumerate()
            .for_each(|(i, event)| put(i, event));
        Ok(())
    })
}

/// Lets one NVFP4_queue_wait() return without events: the one that waits, or the next one that finds none. For a thread that is to do
/// something else, or to end.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_wake(queue: *const NVFP4_Queue) -> NVFP4_Status {
    enter("NVFP4_queue_wake", || get(queue)?.queue.wake())
}

/// Ends a generation, which keeps the tokens that it has; its #NVFP4_EVENT_END follows. One that has ended is left alone. May be called
/// from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_cancel(
    queue: *const NVFP4_Queue,
    generation: u64,
) -> NVFP4_Status {
    enter("NVFP4_queue_cancel", || {
        get(queue)?.queue.cancel(generation)
    })
}

/// Writes a file descriptor that is readable while there are events to take, or NVFP4_queue_wake() was called. The host polls it and does
/// not read, write or close it: the queue does. Linux only.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_fd(
    queue: *const NVFP4_Queue,
    fd: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_queue_fd", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("fd", fd) }?;
        out.set(get(queue)?.queue.fd()?);
        Ok(())
    })
}

/// Writes the numbers of submissions that wait to begin, of generations that run, and of events that wait to be taken. Each place may be
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_queue_counts(
    queue: *const NVFP4_Queue,
    waiting: *mut usize,
    running: *mut usize,
    events: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_queue_counts", || {
        let counts = get(queue)?.queue.counts()?;
        let places = [
            (waiting, counts.waiting),
            (running, counts.running),
            (events, counts.events),
        ];
        for (place, count) in places {
            if !place.is_null() {
                // SAFETY: the pointers are as the header asks.
                unsafe { Out::new("a count", place) }?.set(count);
            }
        }
        Ok(())
    })
}
