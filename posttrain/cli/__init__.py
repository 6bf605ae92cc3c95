"""The command line: one module per verb, which parses its options, calls the library and prints."""
