//! Counters of a generation: cached tokens, preemptions, and the durations of its waiting, its prompt and its tokens.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use NVFP4::engine::Served;
use NVFP4::session::{GenerateOptions, Generation, Session};

use super::{drawn, generate, go, session, with};
use crate::common::{load, options, some_tokens, windows};

fn after(session: &mut Session, prompt: &[u32]) -> Generation {
    session.generate_after(prompt, &drawn(4), &mut go).unwrap()
}

/// A block of sixteen tokens that another session has run does not run again, and neither do the tokens of the session itself.
#[test]
fn cached_tokens_are_those_that_did_not_run() {
    for case in ["qwen3_tied", "gemma3_wide"] {
        let dir = windows::lengthened(case);
        let model = Served::load(&dir.0, &options()).unwrap();
        let tokens = some_tokens(&model, 107);
        let mut first = session(&model);
        let made = after(&mut first, &tokens[..100]);
        assert_eq!((made.prompt_tokens, made.cached_tokens), (100, 0), "{case}");
        let mut second = session(&model);
        let made = after(&mut second, &tokens);
        assert_eq!(
            (made.prompt_tokens, made.cached_tokens),
            (107, 96),
            "{case}"
        );
        let mut private = with(&model, |o| o.private = true);
        assert_eq!(after(&mut private, &tokens).cached_tokens, 0, "{case}");
        // The last token of a generation has not run when it ends.
        let made = after(&mut second, &tokens[..5]);
        assert_eq!(
            (made.prompt_tokens, made.cached_tokens),
            (116, 110),
            "{case}"
        );
        // Logits that are there need no pass.
        first.logits().unwrap();
        let made = generate(&mut first, &drawn(2));
        assert_eq!(
            (made.prompt_tokens, made.cached_tokens),
            (104, 104),
            "{case}"
        );
        let times = made.timings;
        assert_eq!((times.queue_seconds, times.prefill_seconds), (0.0, 0.0));
    }
}

/// A turn counts the tokens that it adds, of which a conversation that begins alike holds some.
#[test]
fn cached_tokens_of_a_turn_are_among_those_that_it_adds() {
    let model: Arc<Served> = load("qwen3_tied");
    let say =
        |session: &mut Session, text: &str| session.chat(text, None, &drawn(3), &mut go).unwrap();
    let long = "word ".repeat(30);
    let (mut first, mut second) = (session(&model), session(&model));
    let made = say(&mut first, &long);
    assert_eq!(made.cached_tokens, 0);
    assert!(made.prompt_tokens >= 32, "{}", made.prompt_tokens);
    let again = say(&mut second, &long);
    let blocks = (made.prompt_tokens - 1) / 16 * 16;
    assert_eq!(
        (again.prompt_tokens, again.cached_tokens),
        (made.prompt_tokens, blocks)
    );
    // A block may hold the first tokens of a later turn only if all before them are the same.
    let next = say(&mut second, "And now something else");
    assert_eq!(next.cached_tokens, 0);
}

#[test]
fn the_times_of_a_generation_are_its_parts() {
    let model = load("qwen3_tied");
    let tokens = some_tokens(&model, 40);
    let pause = Duration::from_millis(30);
    let mut heard = 0;
    let mut on_piece = |_: NVFP4::session::Piece<'_>| {
        heard += 1;
        if heard == 2 {
            thread::sleep(pause);
        }
        ControlFlow::Continue(())
    };
    let mut session = session(&model);
    let made = session.generate_after(&tokens, &drawn(4), &mut on_piece);
    let mut times = made.unwrap().timings;
    let first = times.queue_seconds + times.prefill_seconds;
    assert!(
        (times.first_token_seconds - first).abs() < 1e-6,
        "{times:?}"
    );
    assert!(
        times.queue_seconds > 0.0 && times.prefill_seconds > 0.0,
        "{times:?}"
    );
    assert!(
        times.longest_gap_seconds >= pause.as_secs_f64(),
        "{times:?}"
    );
    assert!(
        times.decode_seconds >= times.longest_gap_seconds,
        "{times:?}"
    );
    let before = times;
    times.add_wait(pause);
    assert_eq!(
        times.queue_seconds,
        before.queue_seconds + pause.as_secs_f64()
    );
    assert_eq!(
        times.first_token_seconds,
        before.first_token_seconds + pause.as_secs_f64()
    );
    // The passes of a replay are those of another sequence.
    let replayed = GenerateOptions {
        replay: true,
        ..drawn(2)
    };
    let made = generate(&mut session, &replayed);
    assert!(made.timings.prefill_seconds > 0.0 && made.cached_tokens == 0);
    // One token has no gap.
    let one = generate(&mut session, &drawn(1)).timings;
    assert_eq!(one.longest_gap_seconds, 0.0);
}
