"""Prompts of known character."""

LOOP = "one two three four " * 30
COUNT = "Count: 1, 2, 3, 4, 5, 6, 7, 8,"
PROSE = "Write a short story about a lighthouse keeper."
IDS = "qz-k7 nova-x71 b3-tt9 lum-04e px-778 wra-2c zeb-91 hq-5f. Repeat the list exactly: "

SHORT = [
    f"{start} {topic}"
    for start in (
        "Write a short story about",
        "Explain in simple words",
        "List five facts about",
        "What is the history of",
        "Describe to a child",
    )
    for topic in (
        "a lighthouse keeper.",
        "the tides of the sea.",
        "how bread is made.",
        "the printing press.",
        "why leaves turn red.",
        "a journey to the moon.",
        "sorting a list of numbers.",
        "the city of Lisbon.",
    )
]
