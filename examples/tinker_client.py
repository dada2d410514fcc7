"""Train an adapter with the public Tinker SDK against a running service: a few supervised steps,
then a sample.

slackwater up                                   # in another terminal; prints a URL and a key
python examples/tinker_client.py URL KEY
"""

import sys

import tinker
from tinker import types

url, key = sys.argv[1:3]
text = list(b"slack water is the quiet between two tides")
datum = types.Datum(
    model_input=types.ModelInput.from_ints(text[:-1]),
    loss_fn_inputs={
        "target_tokens": types.TensorData(data=text[1:], dtype="int64", shape=[len(text) - 1]),
        "weights": types.TensorData(
            data=[1.0] * (len(text) - 1), dtype="float32", shape=[len(text) - 1]
        ),
    },
)
with tinker.ServiceClient(base_url=url, api_key=key) as service:
    model = service.get_server_capabilities().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=str(model), rank=8)
    for step in range(10):
        passed = training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        print(f"step {step}  loss {passed.result().metrics['loss:sum']:.2f}")
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=20, temperature=0.0)
    answer = sampler.sample(types.ModelInput.from_ints(text[:6]), 1, params).result()
    print(f"sampled {len(answer.sequences[0].tokens)} tokens")
