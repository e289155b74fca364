"""Hugging Face's formats: model configs, weights in and out."""
