"""What a capture requests, as plain data without torch.

`request.py` has `Capture` and its wire form, `validation.py` the rules, `estimate.py` the cost, `projections.py` named
matrices, `selection.py` the rows of a running request, `dtypes.py` how numbers are stored."""
