"""Tables of a study: text, CSV, Markdown, TeX and HTML."""
