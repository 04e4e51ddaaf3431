//! The `weir` program: see the library of this crate.
#![allow(unsafe_code)]

/// Runs before `main`, and before the standard library begins: see [`weir_cli::streams`].
extern "C" fn look_at_streams() {
    // SAFETY: the call has no memory of ours. It fails for a descriptor that is not open, and for no other reason.
    weir_cli::streams::note_closed(|stream| unsafe { libc::fcntl(stream, libc::F_GETFD) } == -1);
}

// SAFETY: the loader calls what is in this section once each, with arguments that a C function may ignore. Ours needs nothing that is set up
// later: it calls the kernel, and stores a number.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK_AT_STREAMS: extern "C" fn() = look_at_streams;

fn main() -> std::process::ExitCode {
    weir_cli::main()
}
