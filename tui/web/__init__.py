"""The terminal application in browsers: a small server, and for each window a process of the application."""
