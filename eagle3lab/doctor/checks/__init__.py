"""The checks, one module a subject. `registry.all_checks` imports every module in this folder."""
