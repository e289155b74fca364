"""Recipe files: their fields, values and text, and the names that other trainers give to fields."""
