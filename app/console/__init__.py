"""What every command writes to a console: rows, standard streams, what it is doing and how far it is."""
