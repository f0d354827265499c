"""Reports of studies, made from their records alone."""
