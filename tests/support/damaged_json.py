"""JSON of other shapes than a reader expects."""

DEEP = "[" * 100_000


OTHER = (
    "3",
    "null",
    "[]",
    '"x"',
    "{}",
    '{"runs": 3}',
    '{"runs": [3]}',
    '{"runs": [{"method": 1}]}',
    DEEP,
    '{"a": ' * 9999,
)
