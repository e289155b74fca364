"""`penstock eval`: tasks of lm-evaluation-harness (`harness`) and `needles`, asked of a streamed `QueriedModel`."""
