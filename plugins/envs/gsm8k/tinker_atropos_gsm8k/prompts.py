"""Turns a word problem into what the policy is shown: chat messages or raw text, with worked examples before it."""

from __future__ import annotations

from tinker_atropos.worked_examples import WorkedExamples

INSTRUCTION = "Work it out step by step. Then give the final number on a line of its own, like this: #### <number>"

# New tokens for a worked solution; GSM8K's own take under 400.
MAX_TOKENS = 512

# Where a continued text would begin a problem of its own.
COMPLETION_STOP = ("\n\nQuestion:",)

# Written for this project, so that no problem of any data set is spent on an example.
EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        "A gardener plants 6 rows of tulips with 14 bulbs in each row. Frost kills 9 of the bulbs. How many are left?",
        "There are 6 * 14 = 84 bulbs.\nAfter the frost 84 - 9 = 75 are left.\n#### 75",
    ),
    (
        "A ferry ticket costs $8 for an adult and half as much for a child. What do 2 adults and 3 children pay?",
        "A child's ticket costs 8 / 2 = $4.\nThe adults pay 2 * 8 = $16 and the children 3 * 4 = $12.\n"
        "Together they pay 16 + 12 = $28.\n#### 28",
    ),
    (
        "Ines reads 25 pages a day. Her book has 310 pages, and she has read for 8 days. How many pages remain?",
        "She has read 8 * 25 = 200 pages.\n310 - 200 = 110 pages remain.\n#### 110",
    ),
    (
        "A baker fills 3 trays of 24 rolls. She sells 5/8 of them before noon. How many rolls does she sell by then?",
        "There are 3 * 24 = 72 rolls.\nShe sells 72 * 5 / 8 = 45 of them.\n#### 45",
    ),
    (
        "Tomas walks 3 km to work and back again, five days a week. How far does he walk in 4 weeks?",
        "A day makes 3 * 2 = 6 km.\nA week makes 6 * 5 = 30 km.\nFour weeks make 30 * 4 = 120 km.\n#### 120",
    ),
    (
        "A tank of 900 litres is two thirds full. A pump adds 15 litres a minute. In how many minutes is it full?",
        "It holds 900 * 2 / 3 = 600 litres.\n900 - 600 = 300 litres are missing.\nThat takes 300 / 15 = 20 minutes.\n"
        "#### 20",
    ),
    (
        "A jacket of $60 is marked down by 15%. Lena pays with a $100 note. How much change does she get?",
        "The reduction is 60 * 0.15 = $9.\nShe pays 60 - 9 = $51.\nShe gets 100 - 51 = $49 back.\n#### 49",
    ),
    (
        "Noor is 4 years older than twice the age of her sister, who is 9. How old will Noor be in 6 years?",
        "Noor is 2 * 9 + 4 = 22 years old.\nIn 6 years she will be 22 + 6 = 28.\n#### 28",
    ),
)

SHOWN = WorkedExamples(EXAMPLES, "Question", "Answer")
