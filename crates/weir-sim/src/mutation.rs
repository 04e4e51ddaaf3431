//! Switching the engine's seeded bugs on, for the calling thread.

/// While it lives, the bug is on in this thread.
pub struct Active {
    #[cfg(feature = "mutations")]
    was_set: bool,
}

impl Active {
    /// Switches the bug with this name on; `None` and unknown names switch nothing.
    #[cfg(feature = "mutations")]
    pub fn switch_on(name: Option<&str>) -> Self {
        let mutation = name.and_then(weir::mutation::Mutation::from_name);
        weir::mutation::set(mutation);
        Self { was_set: mutation.is_some() }
    }

    /// Without the feature `mutations` there is nothing to switch on.
    #[cfg(not(feature = "mutations"))]
    pub const fn switch_on(_name: Option<&str>) -> Self {
        Self {}
    }
}

#[cfg(feature = "mutations")]
impl Drop for Active {
    fn drop(&mut self) {
        if self.was_set {
            weir::mutation::set(None);
        }
    }
}

/// The name of the bug that is on in the calling thread.
pub fn active() -> Option<&'static str> {
    #[cfg(feature = "mutations")]
    return weir::mutation::get().map(weir::mutation::Mutation::name);
    #[cfg(not(feature = "mutations"))]
    None
}

/// Names of the seeded bugs; empty without the feature `mutations`.
pub fn names() -> Vec<&'static str> {
    #[cfg(feature = "mutations")]
    return weir::mutation::Mutation::ALL.iter().map(|mutation| mutation.name()).collect();
    #[cfg(not(feature = "mutations"))]
    Vec::new()
}
