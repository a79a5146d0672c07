"""First words of users' turns, which the target goes on writing.

A model that writes a whole turn by itself tells of what it is fond of. One that begins with the
first words of a request goes on with what users ask for: it names the topic, writes the text that
is to be summarised, or the sentence that is to be translated.

Source: the turns that a model writes by itself are those of Magpie, arXiv 2406.08464.
"""

from __future__ import annotations

from random import Random

# Kinds of requests, each drawn as often as the others.
OPENINGS: dict[str, tuple[str, ...]] = {
    "question": (
        "What is the", "What are the", "Who was the first", "When did the", "Where is the",
        "Which country", "How many", "How long does it take to", "Who wrote the", "What year did",
        "Is it true that", "What does the word",
    ),
    "explanation": (
        "Explain how", "Explain why", "Can you explain the concept of", "How does", "Why do",
        "Describe the process of", "What is the difference between", "Give me an overview of",
        "What were the main causes of", "Explain to a child what", "Compare and contrast",
    ),
    "writing": (
        "Write a short story about", "Write a poem about", "Write an email to",
        "Write a blog post about", "Write an essay on", "Write a product description for",
        "Write a speech for", "Write a review of", "Compose a letter to", "Draft a",
        "Write an introduction for", "Create a slogan for",
    ),
    "advice": (
        "How can I", "What is the best way to", "Give me some tips for", "I want to learn",
        "What should I do if", "Help me plan", "Recommend", "List five ways to", "Suggest",
        "Make a list of", "I need ideas for", "Create a step-by-step guide to",
    ),
    "roleplay": (
        "Pretend to be", "Imagine that you are", "You are a", "Act as", "If you were",
        "Suppose you are talking to", "Play the role of",
    ),
    "reasoning": (
        "If all", "A man has", "Which of the following is", "There are three", "Suppose that",
        "What comes next in this sequence:", "Find the odd one out:", "Is the following argument",
        "Which is heavier,",
    ),
    "arithmetic": (
        "A shop sells", "Tom has", "A train leaves", "If a car travels", "Anna buys",
        "The sum of two numbers is", "A farmer has", "What is 15% of", "Solve the equation",
        "How much does it cost to", "There are 24 students in", "Calculate the area of",
    ),
    "code": (
        "Write a Python function that", "Write a program that", "Write a SQL query to",
        "Write a JavaScript function to", "How do I", "Explain this code:\n\n",
        "Find the bug in this code:\n\n", "Write an HTML page", "Implement a class",
        "What does this function do?\n\ndef",
    ),
    "extraction": (
        "List the names of the people in this text:\n\n", "What is the main idea of this text?\n\n",
        "Extract the dates and places from the following paragraph.\n\n",
        "Classify the sentiment of this review:", "Identify the key points of the text below.\n\n",
        "Turn the following sentences into a table.\n\n",
    ),
    "summary": (
        "Summarize the following article.\n\n", "Summarize this text in one sentence:\n\n",
        "Give me a summary of the text below.\n\n", "TL;DR of this story:\n\n",
        "Write a title and a short summary for this news report:\n\n",
    ),
    "rewriting": (
        "Rewrite this sentence in a formal tone:", "Correct the grammar of this text:",
        "Make this paragraph shorter:\n\n", "Rephrase the following sentence:",
        "Translate the following sentence to English:", "Translate this text from German:",
        "Translate this paragraph from French into English:\n\n", "Turn this into a question:",
    ),
    "reading": (
        "Use the passages below to answer the question.\n\nPassage:",
        "Answer the question after reading this text.\n\nText:", "Context:",
        "Read this paragraph and answer the question.\n\n",
        "Based on the following information, who",
    ),
}  # fmt: skip


def opening_of(number: int, share: float, seed: int) -> str:
    """The first words of the user's turn of a conversation; empty where it has none.

    Args:
        number: of the conversation.
        share: of the conversations that have an opening, in [0, 1].
        seed: of the draws, which depend on the number beside it alone.
    """
    random = Random(f"{seed} {number}")
    if random.random() >= share:
        return ""
    kind = random.choice(list(OPENINGS))
    return random.choice(OPENINGS[kind])
