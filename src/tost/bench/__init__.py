"""Measurements behind a gate: no speed is shown unless every implementation agrees with the reference.

`cases` says what is measured, `contenders` against whom, `timing` and `memory` how, `gate` under which condition, and
`ops` puts them together; `report` and `plot` turn the result into files. Importing this package loads no torch.
"""
