"""Answers commands and files in the style of other libraries: what each of their options is called here.

One module per library holds a table per family of verbs (meanings.py says how), answer.py finds the library and writes
the message, page.py the tables of docs/coming-from.md. Nothing here is imported unless an option was not understood.
"""
