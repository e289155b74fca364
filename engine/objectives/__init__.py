"""What training minimises: a sum over targets of a coefficient times the negative log-likelihood."""
