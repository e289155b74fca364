"""What the screens show, read from files; no Textual here."""
