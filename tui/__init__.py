"""The terminal application: a pure reader of run directories, in a process of its own."""
