"""The Hugging Face hub: names, what is fetched into its cache and checked, an export pushed."""
