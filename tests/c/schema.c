/* The 4-bit weights of sets of named tensors: found, described, and refused with everything that is wrong in one message. */
#include "check.h"

static char text[8192];

static NVFP4_NamedTensor tensor(const char *name, int32_t dtype, int32_t rank, const int64_t *sizes)
{
    NVFP4_NamedTensor out;
    out.name = name;
    out.name_length = strlen(name);
    out.dtype = dtype;
    out.rank = rank;
    out.sizes = sizes;
    return out;
}

static NVFP4_SchemaResult detect(const NVFP4_NamedTensor *set, size_t count, const char *prefix)
{
    NVFP4_SchemaResult result;
    result.struct_size = sizeof result;
    OK(NVFP4_schema_detect(set, count, sizeof(NVFP4_NamedTensor), prefix, prefix == NULL ? 0 : strlen(prefix), &result));
    CHECK(result.struct_size == sizeof result);
    return result;
}

static const int64_t codes[] = {32, 64}, scales[] = {32, 8}, sixteen[] = {16}, blocks[] = {64}, rows[] = {32};
#define U8 NVFP4_DTYPE_UINT8
#define F32 NVFP4_DTYPE_FLOAT32

static void both_formats(void)
{
    const NVFP4_NamedTensor set[] = {
        tensor("l.0.qdata", U8, 2, codes),   tensor("l.0.scale", NVFP4_DTYPE_FLOAT8_E4M3FN, 2, scales),
        tensor("l.0.bias", F32, 1, rows),    tensor("l.1.weight", U8, 2, codes),
        tensor("l.1.absmax", F32, 1, blocks), tensor("l.1.quant_map", F32, 1, sixteen),
        /* Complex numbers, which the library has no name for, do no harm. */
        tensor("other", 9, 1, rows),
    };
    NVFP4_SchemaResult r = detect(set, 7, NULL);
    CHECK(r.format == NVFP4_FORMAT_MIXED && r.tensors == 7 && r.weights == 2 && r.problems == 0);
    CHECK(r.out_features == 0 && r.in_features == 0 && r.block == 0);
    r = detect(set, 7, "l.0");
    CHECK(r.format == NVFP4_FORMAT_NVFP4 && r.tensors == 3 && r.weights == 1 && r.problems == 0);
    CHECK(r.out_features == 32 && r.in_features == 128 && r.block == 16);
    r = detect(set, 7, "l.1");
    CHECK(r.format == NVFP4_FORMAT_NF4 && r.out_features == 32 && r.in_features == 128 && r.block == 64);
    r = detect(set, 7, "other");
    CHECK(r.format == NVFP4_FORMAT_NONE && r.tensors == 1 && r.weights == 0);
    r = detect(NULL, 0, NULL);
    CHECK(r.format == NVFP4_FORMAT_NONE && r.tensors == 0);
    OK(NVFP4_schema_validate(set, 7, sizeof(NVFP4_NamedTensor), NULL, 0));

    size_t length, again;
    OK(NVFP4_schema_report(set, 7, sizeof(NVFP4_NamedTensor), "l.0", 3, NULL, 0, &length));
    OK(NVFP4_schema_report(set, 7, sizeof(NVFP4_NamedTensor), "l.0", 3, text, sizeof text, &again));
    CHECK(length == again && strlen(text) == length);
    const char *expected = "{\"format\":\"nvfp4\",\"tensors\":3,\"problems\":0,\"weights\":[{\"name\":\"l.0.weight\","
                           "\"format\":\"nvfp4\",\"convention\":\"dat\",\"keys\":{\"codes\":\"l.0.qdata\","
                           "\"scales\":\"l.0.scale\"},\"missing\":[],\"extra\":[\"l.0.bias\"],\"out_features\":32,"
                           "\"in_features\":128,\"block\":16,\"faults\":[]}]}";
    CHECK(strcmp(text, expected) == 0);

    /* A later host's elements and result are larger; fields that this version does not know are 0. */
    struct { NVFP4_NamedTensor known; uint64_t unknown; } later[7];
    struct { NVFP4_SchemaResult known; uint64_t unknown; } result = {.known = {.struct_size = sizeof result}, .unknown = 1};
    for (int i = 0; i < 7; i++) {
        later[i].known = set[i];
        later[i].unknown = 0;
    }
    OK(NVFP4_schema_detect(&later->known, 7, sizeof later[0], NULL, 0, &result.known));
    CHECK(result.known.format == NVFP4_FORMAT_MIXED && result.known.weights == 2 && result.unknown == 0);
}

static void what_is_wrong(void)
{
    const int64_t odd[] = {7, 9}, few[] = {31};
    NVFP4_NamedTensor set[] = {
        tensor("a.qdata", U8, 2, codes),
        tensor("b.weight", U8, 2, codes),
        tensor("b.quant_map", F32, 1, sixteen),
        tensor("c.weight.qdata", U8, 2, odd),
    };
    NVFP4_SchemaResult r = detect(set, 4, NULL);
    CHECK(r.format == NVFP4_FORMAT_MIXED && r.weights == 3 && r.problems == 4);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_schema_validate(set, 4, sizeof(NVFP4_NamedTensor), NULL, 0));
    CHECK(strcmp(NVFP4_last_error(), "missing tensors: 'a.scale', 'b.absmax', 'c.weight.scale'; "
                                     "'c.weight.qdata': its dimensions [7, 9] are not aligned to 8") == 0);
    FAILS(NVFP4_NOT_FOUND, NVFP4_schema_validate(set, 4, sizeof(NVFP4_NamedTensor), "d", 1));
    SAYS(".qdata");

    set[0] = tensor("b.absmax", F32, 1, few);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_schema_validate(set, 4, sizeof(NVFP4_NamedTensor), "b", 1));
    SAYS("'b.absmax': 31 scales do not divide 4096 values");
}

int main(void)
{
    both_formats();
    what_is_wrong();
    return report("schema");
}
