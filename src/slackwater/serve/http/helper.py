"""`python -m slackwater.serve.http.helper`: the process that parses large bodies."""

from slackwater.runtime.services.helper_processes import Parts, serve_questions


def answer(question: Parts) -> Parts:
    """Read a JSON body of some type, or a training batch, as the first word tells."""
    work, _, argument = question[0].decode().partition(" ")
    if work == "body":
        from slackwater.serve.http.body_reader import answer as read_body

        return read_body(argument, question[1])
    from slackwater.serve.tinker.pass_reader import answer as read_pass

    return read_pass(argument, question[1])


if __name__ == "__main__":
    serve_questions(answer)
