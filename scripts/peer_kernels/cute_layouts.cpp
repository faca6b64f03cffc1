// Writes CUTLASS's reading of fragments, swizzles and descriptors as JSON to standard error: make_cute_layouts.py turns
// it into tests/data/cute_layouts.json. It runs on the host.
#include <cstdio>

#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm89.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/layout.hpp>
#include <cute/tensor.hpp>

using namespace cute;

static bool is_first = true;

static void key(const char* name) {
    fprintf(stderr, "%s\n\"%s\": ", is_first ? "" : ",", name);
    is_first = true;
}

template <class F> void list(int count, const F& at) {
    fprintf(stderr, "[");
    for (int i = 0; i < count; i++) {
        fprintf(stderr, i == 0 ? "%llu" : ", %llu", static_cast<unsigned long long>(at(i)));
    }
    fprintf(stderr, "]");
    is_first = false;
}

// A layout (thread, value) -> element, thread by thread.
template <class Layout> void thread_values(const char* name, const Layout& layout) {
    const int values = size<1>(layout);
    key(name);
    list(size<0>(layout) * values, [&](int i) { return layout(i / values, i % values); });
}

static void begin(const char* name) {
    key(name);
    fprintf(stderr, "{");
}

static void end() {
    fprintf(stderr, "}");
    is_first = false;
}

// a: m + M * k, b: n + N * k, c: m + M * n
template <class Atom> void mma(const char* name) {
    using Traits = MMA_Traits<Atom>;
    begin(name);
    key("shape");
    list(3, [](int i) {
        const int shape[] = {size<0>(typename Traits::Shape_MNK{}), size<1>(typename Traits::Shape_MNK{}),
                             size<2>(typename Traits::Shape_MNK{})};
        return shape[i];
    });
    thread_values("a", typename Traits::ALayout{});
    thread_values("b", typename Traits::BLayout{});
    thread_values("c", typename Traits::CLayout{});
    end();
}

// In bits: where a row begins that a lane addresses, and where each 16-bit number of a lane's result lies.
template <class Atom> void ldmatrix(const char* name) {
    using Traits = Copy_Traits<Atom>;
    const typename Traits::SrcLayout from;
    const typename Traits::DstLayout to;
    begin(name);
    key("rows");
    list(32, [&](int lane) { return from(lane, 0); });
    const int values = size<1>(to) / 16;
    key("results");
    list(32 * values, [&](int i) { return to(i / values, i % values * 16); });
    end();
}

// Where wgmma finds the elements of an operand of 16-bit numbers, by m + M * k, and the descriptors (for shared memory
// that starts at 0) of its parts of 16 columns.
template <class Atom, SM90::GMMA::Major MAJOR, int MN, int K> void operand(const char* name) {
    const auto layout = tile_to_shape(Atom{}, Shape<Int<MN>, Int<K>>{});
    begin(name);
    key("shape");
    list(2, [](int i) { return i == 0 ? MN : K; });
    key("offsets");
    // CuTe swizzles addresses; these are the offsets that follow where the start has no bit that is swizzled.
    const auto offsets = as_position_independent_swizzle_layout(layout);
    list(MN * K, [&](int i) { return offsets(i % MN, i / MN); });
    const auto tensor = make_tensor(make_smem_ptr(static_cast<half_t*>(nullptr)), layout);
    key("descriptors");
    list(K / 16, [&](int part) -> unsigned long long {
        const auto piece = local_tile(tensor, Shape<Int<MN>, _16>{}, make_coord(0, part));
        return SM90::GMMA::make_gmma_desc<MAJOR>(piece).desc_;
    });
    // The offset of each part, which is to be added to the descriptor's address.
    key("starts");
    list(K / 16, [&](int part) { return offsets(0, part * 16); });
    end();
}

int main() {
    fprintf(stderr, "{");
    begin("mma");
    mma<SM80_16x8x16_F32F16F16F32_TN>("m16n8k16.16bit");
    mma<SM80_16x8x8_F32F16F16F32_TN>("m16n8k8.16bit");
    mma<SM80_16x8x8_F32TF32TF32F32_TN>("m16n8k8.tf32");
    mma<SM80_16x8x4_F32TF32TF32F32_TN>("m16n8k4.tf32");
    mma<SM80_16x8x16_S32S8S8S32_TN>("m16n8k16.8bit");
    mma<SM80_16x8x32_S32S8S8S32_TN>("m16n8k32.8bit");
    mma<SM89_16x8x32_F32E4M3E4M3F32_TN>("m16n8k32.fp8");
    end();
    begin("ldmatrix");
    ldmatrix<SM75_U32x1_LDSM_N>("x1");
    ldmatrix<SM75_U32x2_LDSM_N>("x2");
    ldmatrix<SM75_U32x4_LDSM_N>("x4");
    ldmatrix<SM75_U16x2_LDSM_T>("x1.trans");
    ldmatrix<SM75_U16x4_LDSM_T>("x2.trans");
    ldmatrix<SM75_U16x8_LDSM_T>("x4.trans");
    end();
    begin("wgmma");
    thread_values("a.64x16", SM90::GMMA::ALayout_64x16{});
    thread_values("c.64x64", SM90::GMMA::CLayout_64x64{});
    using namespace SM90::GMMA;
    operand<Layout_K_INTER_Atom<half_t>, SM90::GMMA::Major::K, 64, 32>("k.none");
    operand<Layout_K_SW32_Atom<half_t>, SM90::GMMA::Major::K, 64, 32>("k.32");
    operand<Layout_K_SW64_Atom<half_t>, SM90::GMMA::Major::K, 64, 32>("k.64");
    operand<Layout_K_SW128_Atom<half_t>, SM90::GMMA::Major::K, 64, 64>("k.128");
    operand<Layout_MN_INTER_Atom<half_t>, SM90::GMMA::Major::MN, 64, 32>("mn.none");
    operand<Layout_MN_SW32_Atom<half_t>, SM90::GMMA::Major::MN, 64, 32>("mn.32");
    operand<Layout_MN_SW64_Atom<half_t>, SM90::GMMA::Major::MN, 64, 32>("mn.64");
    operand<Layout_MN_SW128_Atom<half_t>, SM90::GMMA::Major::MN, 64, 32>("mn.128");
    end();
    fprintf(stderr, "}\n");
}
