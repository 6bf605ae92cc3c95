"""The options of all verbs: sections, the reader, checks between values, previous spellings, help."""
