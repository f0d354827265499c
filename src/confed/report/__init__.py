"""HTML reports, tables and figures of studies, made from their records alone."""
