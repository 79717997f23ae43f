/* A stand-in for libcuda.so.1 on machines without an NVIDIA driver.
 *
 * cuDNN's runtime-compiled engines link against libcuda.so.1 even when they only compile. NVRTC does the real
 * compilation for the target GPU; what the engines then ask of the driver is to store the finished kernel and set
 * attributes on it. Those calls succeed here with a dummy handle. Every other call, cuInit among them, answers
 * CUDA_ERROR_NO_DEVICE, so torch.cuda.is_available() stays False and nothing can be launched.
 *
 * Built by helpers/target.py with the system's C compiler; never loaded where a driver is installed.
 */
#include <stddef.h>

enum { SUCCESS = 0, NO_DEVICE = 100 };

static char dummy; /* its address is the handle of every stored kernel, library and module */

#define REFUSES(name) \
    int name(void) { return NO_DEVICE; }
#define ACCEPTS(name) \
    int name(void) { return SUCCESS; }
/* The new handle is returned through the first argument. */
#define RETURNS_HANDLE(name) \
    int name(void **handle) { *handle = &dummy; return SUCCESS; }

REFUSES(cuInit)
REFUSES(cuDriverGetVersion)
REFUSES(cuDeviceGet)
REFUSES(cuDeviceGetCount)
REFUSES(cuDeviceGetAttribute)
REFUSES(cuDeviceGetName)
REFUSES(cuDevicePrimaryCtxRetain)
REFUSES(cuCtxGetCurrent)
REFUSES(cuCtxSetCurrent)
REFUSES(cuCtxGetDevice)
REFUSES(cuCtxGetLimit)
REFUSES(cuCtxPopCurrent)
REFUSES(cuCtxPushCurrent)
REFUSES(cuGetErrorName)
REFUSES(cuGetErrorString)
REFUSES(cuGetProcAddress)
REFUSES(cuGetProcAddress_v2)
REFUSES(cuLaunchCooperativeKernel)
REFUSES(cuLaunchKernel)
REFUSES(cuLaunchKernelEx)
REFUSES(cuLinkAddData)
REFUSES(cuLinkComplete)
REFUSES(cuLinkCreate)
REFUSES(cuLinkDestroy)
REFUSES(cuStreamGetCtx)
REFUSES(cuTensorMapEncodeIm2col)
REFUSES(cuTensorMapEncodeTiled)

RETURNS_HANDLE(cuLibraryLoadData)
RETURNS_HANDLE(cuLibraryLoadFromFile)
RETURNS_HANDLE(cuLibraryGetKernel)
RETURNS_HANDLE(cuKernelGetFunction)
RETURNS_HANDLE(cuModuleLoadData)
RETURNS_HANDLE(cuModuleGetFunction)
ACCEPTS(cuLibraryUnload)
ACCEPTS(cuModuleUnload)
ACCEPTS(cuKernelSetAttribute)
ACCEPTS(cuFuncSetAttribute)

int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)attribute, (void)kernel, (void)device;
    *value = 0;
    return SUCCESS;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)attribute, (void)function;
    *value = 0;
    return SUCCESS;
}

/* 8 blocks is the largest cluster size that every GPU with clusters supports (CUDA C++ Programming Guide, "Thread
 * Block Clusters"). */
int cuOccupancyMaxPotentialClusterSize(int *size, void *function, const void *config) {
    (void)function, (void)config;
    *size = 8;
    return SUCCESS;
}
