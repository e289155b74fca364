"""Pure renderers: figures in, rows of text out (app/rows.py); no Textual here."""
