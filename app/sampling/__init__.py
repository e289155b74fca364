"""Exported models and runs that are opened to be asked: text continued, a chat, one test prompt."""
