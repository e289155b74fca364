"""Pure renderers: figures in, rows of text out (app/console/rows.py); no Textual here."""
