"""Whether an answer to a Babilong question is right: the rule of spec/eval.md section 3.

Pure functions, used by task.py. Answers that list every place, or that repeat the question's, are
not right, which the harness's own `babilong` (target occurs in the answer) calls them.
"""

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
GIVING = ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk")
LABELS = {"qa1": PLACES, "qa2": PLACES, "qa3": PLACES, "qa4": PLACES, "qa5": GIVING}
ENDS = (".", "<context>", "<example>")
"""What an answer ends before: its sentence, or a further example that the model makes up."""


def is_right(task: str, question: str, target: str, answer: str) -> bool:
    """Whether the labels that only the answer names are exactly the target; case is ignored.

    A label is named where it occurs as a piece of text ("bedrooms" names the bedroom, and
    "billion" names Bill), in the question as in the answer.
    """
    answer, question = answer.lower(), question.lower()
    for end in ENDS:
        answer = answer.partition(end)[0]
    labels = {label.lower() for label in LABELS[task]}
    named = {label for label in labels if label in answer and label not in question}
    return named == {target.lower()}
