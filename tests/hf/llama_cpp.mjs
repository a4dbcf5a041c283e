// node llama_cpp.mjs NODE_LLAMA_CPP MODEL.gguf < texts.json: prints [{ids, next, nats}] as JSON.
// `ids`: llama.cpp's tokens of a text, with what it adds to a prompt; `next`: the likeliest after;
// `nats`: of all tokens after the first.
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const [folder, modelPath] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(`${folder}/dist/index.js`).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: 1});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: 128});
const sequence = context.getSequence();

// the model's own probabilities, of all tokens
const generateNext = {probabilities: true, options: {temperature: 1, topK: 0, topP: 1, minP: 0}};

const answers = [];
for (const text of JSON.parse(readFileSync(0, "utf8"))) {
    const ids = model.tokenize(text, false);
    if (model.tokens.shouldPrependBosToken)
        ids.unshift(model.tokens.bos);

    await sequence.clearHistory();
    const outputs = await sequence.controlledEvaluate(ids.map((id) => [id, {generateNext}]));
    const probabilities = outputs.map((output) => output.next.probabilities);

    let nats = 0;
    for (let i = 1; i < ids.length; i++)
        nats -= Math.log(probabilities[i - 1].get(ids[i]));
    const [next] = probabilities.at(-1).keys();
    answers.push({ids, next, nats});
}
console.log(JSON.stringify(answers));
process.exit(0);
